"""What a row costs at each level: CPU time to reduce it, and bytes on disk, by width and dtype.

    python tests/benchmarks/bench_sketch.py

Rows are random, 800 of them a site, put to the writer 8 at a time as a server's decode batches come. CPU time is that
of one thread, the median of some runs; `copy` is what level ``values`` does with a row before it is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from eagle_trace.capture import Array, Rows, dtype_name, row_statistics
from eagle_trace.manifest import Manifest
from eagle_trace.sketch import sketch
from eagle_trace.writer import TraceWriter, prepare_output

ROWS, BATCH, RUNS = 800, 8, 9
WIDTHS = (128, 576, 1728, 4096, 14336)
LEVELS = ("stats", "sketch", "values")


def micros(work: Callable[[], object], rows: int) -> float:
    """CPU time of `work` a row, in microseconds."""
    spent = []
    for _ in range(RUNS):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return statistics.median(spent) / rows * 1e6


def size_on_disk(values: Array, level: str, path: Path) -> float:
    """Bytes a row below values/, keys and footers included."""
    prepare_output(path)
    writer = TraceWriter(path, Manifest("serve", level, "benchmark"), max_wait=None)
    for start in range(0, len(values), BATCH):
        at = list(range(start, min(start + BATCH, len(values))))
        tokens = np.random.default_rng(start).integers(0, 50_000, len(at))
        rows = Rows.build(
            prompt_id=[start % 7] * len(at), root=at, step=[0] * len(at), token_id=tokens, position=at,
            call_id=start // BATCH,
        )  # fmt: skip
        writer.put_values("fc.out", rows, values[at])
    return sum(file.stat().st_size for file in (writer.seal() / "values").rglob("*.parquet")) / len(values)


def main() -> None:
    """Print a row a width and dtype."""
    print(f"{'width':>6} {'dtype':9} {'us a row: copy':>14} {'stats':>6} {'sketch':>6}", end="")
    print("".join(f"{f'{level} B':>10} {'of raw':>7}" for level in LEVELS))
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            for dtype in (np.float32, ml_dtypes.bfloat16):
                values: Array = np.random.default_rng(0).standard_normal((ROWS, width)).astype(dtype)
                facts = row_statistics(values)
                costs = [
                    micros(values.copy, ROWS),
                    micros(lambda values=values: row_statistics(values), ROWS),
                    micros(lambda values=values, facts=facts: sketch(values, facts), ROWS),
                ]
                sizes = [
                    size_on_disk(values, level, Path(folder) / f"{level}{width}{dtype_name(values)}")
                    for level in LEVELS
                ]
                print(f"{width:6} {dtype_name(values):9} {costs[0]:14.2f} {costs[1]:6.2f} {costs[2]:6.2f}", end="")
                raw = width * values.itemsize
                print("".join(f"{size:10.0f} {size / raw:7.2%}" for size in sizes))


if __name__ == "__main__":
    main()
