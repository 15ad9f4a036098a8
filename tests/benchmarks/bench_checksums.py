"""What verifying costs a diff: the same pair with its checksums (XXH3), with CRC-32 instead, and without any.

    python tests/benchmarks/bench_checksums.py [MB] [--hidden 2048]

All three read the same files in one process, in turn; the least CPU seconds of each count, and their ratio to the
pass that verifies nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import zlib
from pathlib import Path
from unittest import mock

from eagle_trace import checksums
from eagle_trace.capture import DTYPES
from tests.benchmarks.bench_diff import make_trace, run_diff, site_widths

ROUNDS = 5


def _without(self: checksums.VerifiedFile, start: int, stop: int) -> memoryview:
    return memoryview(self._source.read_at(start, stop - start))


def _as_crc32(self: checksums.VerifiedFile, start: int, stop: int) -> memoryview:
    """The same reads, each piece hashed with CRC-32 (which is held against nothing: only the time counts)."""
    pieces = self._pieces
    assert pieces is not None
    numbers = pieces.covering(start, stop)
    first = pieces.start(numbers[0])
    data = memoryview(self._source.read_at(first, int(pieces.ends[numbers[-1]]) - first)).cast("B")
    for number in numbers:
        zlib.crc32(data[pieces.start(number) - first : int(pieces.ends[number]) - first])
    return data[start - first : stop - first]


def main() -> None:
    """Print the three times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", type=int, default=400, help="MB of values on both sides")
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    verified = checksums.VerifiedFile._verified
    ways = {"none": _without, "XXH3": verified, "CRC-32": _as_crc32}
    least = dict.fromkeys(ways, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder) / "train.trace", Path(folder) / "serve.trace"
        row_bytes = sum(site_widths(options.hidden).values()) * DTYPES["float32"].itemsize
        for path, side in zip(pair, ("train", "serve"), strict=True):
            make_trace(path, side, max(1, int(options.size * 1e6 / row_bytes / 2)), options.hidden, "float32")
        run_diff(*pair, workers=1)
        for _ in range(ROUNDS):
            for name, way in ways.items():
                with mock.patch.object(checksums.VerifiedFile, "_verified", way):
                    started = time.process_time()
                    run_diff(*pair, workers=1)
                    least[name] = min(least[name], time.process_time() - started)
    for name, seconds in least.items():
        print(f"{name:7} {seconds:6.3f} s of CPU, {seconds / least['none']:.3f} of a diff that verifies nothing")


if __name__ == "__main__":
    main()
