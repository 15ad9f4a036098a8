"""How fast and in how much memory two traces are diffed, beside a bare numpy pass over the same bytes.

    python tests/benchmarks/bench_diff.py [LARGEST_MB] [--dtype float32] [--hidden 2048] [--keep DIR]

The bare pass is what anyone would write by hand: read both sites, subtract, norm. Each measurement runs in a
process of its own, so that peak memory is its own too. The rate counts the value bytes of both traces.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from eagle_trace.capture import DTYPES, Rows
from eagle_trace.manifest import Manifest
from eagle_trace.reader import open_trace
from eagle_trace.sites import draft_sites
from eagle_trace.writer import TraceWriter, prepare_output

VOCAB = 32_000
CHUNK = 256
REPEATS = 3


def site_widths(hidden: int) -> dict[str, int]:
    """Width of every value site of a draft of this hidden size."""
    size = {
        "G": hidden,
        "n*G": 3 * hidden,
        "H": hidden,
        "A": hidden,
        "K": hidden // 4,
        "I": 3 * hidden,
        "V": VOCAB,
    }
    return {site.name: size[site.axes[0]] for site in draft_sites() if site.kind == "value"}


def make_trace(path: Path, side: str, rows: int, hidden: int, dtype: str) -> None:
    """A trace of `rows` step-0 rows at every site; the serve side is off by one rounding."""
    prepare_output(path)
    writer = TraceWriter(path, Manifest(side, "values", "bench", dtype=dtype, prompts_digest="bench"))  # type: ignore[arg-type]
    prompts = -(-rows // CHUNK)
    for number in range(prompts):
        tokens = np.arange(CHUNK + 1)
        record = {
            "prompt_id": number,
            "prompt_key": f"p{number}",
            "token_ids": tokens,
            "num_prompt_tokens": len(tokens),
        }
        writer.put_record("prompts", record)
    rng = np.random.default_rng(0)
    noise = np.random.default_rng(side == "serve")
    # one block of numbers a site, used again for each prompt: making them would take longer than the diff
    blocks = {}
    for site, width in site_widths(hidden).items():
        block = rng.standard_normal((CHUNK, width), dtype=np.float32)
        block *= 1 + float(np.finfo(DTYPES[dtype]).eps if dtype == "float32" else 2**-8) * noise.uniform(
            -0.5, 0.5, width
        )
        blocks[site] = block.astype(DTYPES[dtype])
    for number in range(prompts):
        count = min(CHUNK, rows - number * CHUNK)
        index = np.arange(count, dtype=np.int32)
        keys = Rows.build(
            prompt_id=np.full(count, number, np.int32),
            root=index,
            step=np.zeros(count, np.int32),
            token_id=index + 1,
            position=index,
            call_id=number,
        )
        writer.put_rows(keys)
        for site, block in blocks.items():
            writer.put_values(site, keys, block[:count].copy())
    writer.seal()


def bare_pass(train: Path, serve: Path) -> None:
    """Read both files of every site, subtract, norm."""
    import pyarrow.parquet as pq

    for folder in sorted((train / "values").iterdir()):
        for file in sorted(folder.glob("*.parquet")):
            sides = []
            for path in (file, serve / "values" / folder.name / file.name):
                column = pq.read_table(path, columns=["values"], partitioning=None).column("values").combine_chunks()
                dtype = DTYPES[pq.read_schema(path).metadata[b"eagle_trace.dtype"].decode()]
                chunk = column.chunk(0) if hasattr(column, "chunk") else column
                flat = np.frombuffer(chunk.buffers()[1], np.uint8).view(dtype)
                sides.append(flat.astype(np.float32, copy=False).reshape(len(chunk), -1))
            y, x = sides
            np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)


def run_diff(train: Path, serve: Path) -> None:
    """The diff."""
    from eagle_trace_analysis import diff

    result = diff(open_trace(train), open_trace(serve))
    if result.verdict != "agree":
        raise SystemExit(f"the benchmark's traces should agree: {result.first_divergence or result.incomparable}")


def _child(work: Callable[[Path, Path], None], train: Path, serve: Path, connection: object) -> None:
    # the first pass warms the page cache and the imports; of the others the fastest counts (machines are
    # shared)
    work(train, serve)
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work(train, serve)
        taken.append(time.perf_counter() - started)
    # not getrusage: its maximum starts from the parent's size at the time of the fork
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    connection.send((min(taken), peak / 1024))  # type: ignore[attr-defined]


def measure(work: Callable[[Path, Path], None], train: Path, serve: Path) -> tuple[float, float]:
    """Seconds and peak memory (MB) of `work` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, train, serve, sender))
    process.start()
    sender.close()
    taken: tuple[float, float] = receiver.recv()
    process.join()
    return taken


def main() -> None:
    """Print one line a trace size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("largest", nargs="?", type=int, default=400, help="largest pair, MB of values on both sides")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--keep", type=Path, help="folder for the traces (default: a temporary one)")
    options = parser.parse_args()
    row_bytes = sum(site_widths(options.hidden).values()) * DTYPES[options.dtype].itemsize
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        print(
            f"{options.dtype}, hidden {options.hidden}, {row_bytes / 1e3:.0f} kB a row; "
            "peak memory includes Python itself"
        )
        print(
            f"{'pair MB':>8} {'rows':>7} {'bare s':>7} {'GB/s':>6} {'MB':>6} "
            f"{'diff s':>7} {'GB/s':>6} {'MB':>6} {'ratio':>6}"
        )
        size = 100
        while size <= options.largest:
            rows = max(1, int(size * 1e6 / row_bytes / 2))
            pair = [folder / f"{side}-{size}.trace" for side in ("train", "serve")]
            for path, side in zip(pair, ("train", "serve"), strict=True):
                make_trace(path, side, rows, options.hidden, options.dtype)
            total = 2 * rows * row_bytes / 1e9
            bare, bare_memory = measure(bare_pass, *pair)
            taken, memory = measure(run_diff, *pair)
            print(
                f"{total * 1e3:8.0f} {rows:7d} {bare:7.2f} {total / bare:6.2f} {bare_memory:6.0f} "
                f"{taken:7.2f} {total / taken:6.2f} {memory:6.0f} {bare / taken:6.2f}",
                flush=True,
            )
            size *= 2


if __name__ == "__main__":
    main()
