"""How fast and in how much memory two traces are diffed, beside a bare numpy pass over the same bytes.

    python tests/benchmarks/bench_diff.py [MB ...] [--dtype float32] [--hidden 2048] [--workers N] [--rows 200000]

The bare pass is what anyone would write by hand: read both sites, subtract, norm. Each measurement runs in
processes of its own, so that peak memory is its own too, the two kinds in turn, because machines are shared; the
fastest counts. The rate counts the value bytes of both traces; the ratios are the bare pass's seconds, and its seconds
of all cores, over the diff's. With --rows, also a pair of many short captures:
57 sites of 8 elements, where aligning and the best ids take the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.capture import DTYPES, Rows
from eagle_trace.manifest import Manifest
from eagle_trace.reader import open_trace
from eagle_trace.sites import draft_sites
from eagle_trace.writer import TraceWriter, prepare_output

VOCAB = 32_000
CHUNK = 256
REPEATS = 3
ROUNDS = 2
ROOTS, STEPS, TOP = 25, 4, 10


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
    manifest = Manifest(side, "values", "bench", dtype=dtype, prompts_digest="bench")  # type: ignore[arg-type]
    writer = TraceWriter(path, manifest, max_wait=None)
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


def make_short(path: Path, side: str, rows: int) -> None:
    """Many short captures: `rows` rows of steps 0 to 3 with their best ids; serve takes 32 prompts at a time."""
    prepare_output(path)
    writer = TraceWriter(
        path, Manifest(side, "values", "bench", dtype="float32", prompts_digest="bench"), max_wait=None
    )  # type: ignore[arg-type]
    prompts = rows // (ROOTS * STEPS)
    for number in range(prompts):
        tokens = np.arange(ROOTS + 1)
        writer.put_record(
            "prompts",
            {"prompt_id": number, "prompt_key": f"p{number}", "token_ids": tokens, "num_prompt_tokens": ROOTS // 2},
        )
    sites = [site.name for site in draft_sites(3, 3) if site.kind == "value"]
    together = 1 if side == "train" else 32
    calls = 0
    for first in range(0, prompts, together):
        batch = np.arange(first, min(first + together, prompts))
        for step in range(STEPS):
            prompt, root = (grid.reshape(-1) for grid in np.meshgrid(batch, np.arange(ROOTS), indexing="ij"))
            count = len(root)
            keys = Rows.build(
                prompt_id=prompt.astype(np.int32),
                root=root.astype(np.int32),
                step=np.full(count, step, dtype=np.int32),
                token_id=(root + step + 1).astype(np.int32),
                position=(root + step).astype(np.int32),
                call_id=calls,
                path=(root[:, None] + 2 + np.arange(step)).astype(np.int32),
            )
            calls += 1
            writer.put_rows(keys)
            values = np.sin(np.arange(8) + (root + prompt)[:, None]).astype(np.float32)
            for site in sites:
                writer.put_values(site, keys, values.copy())
            ids = np.tile(np.arange(TOP), (count, 1))
            writer.put_topk(keys, ids, ids, -ids.astype(np.float32), -ids.astype(np.float32))
    writer.seal()


def bare_pass(train: Path, serve: Path) -> None:
    """Read both sides of every site, subtract, norm."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for folder in sorted((train / "values").iterdir()):
        # a site at a time: where a side's parts end follows from when they were written
        tables = []
        for path in (folder, serve / "values" / folder.name):
            files = sorted(path.glob("*.parquet"))
            parts = [pq.read_table(file, columns=["values"], partitioning=None) for file in files]
            tables.append(pa.concat_tables(parts))
            dtype = DTYPES[pq.read_schema(files[0]).metadata[b"eagle_trace.dtype"].decode()]
        for first in range(0, len(tables[0]), CHUNK):
            y, x = (_floats(table.slice(first, CHUNK), dtype) for table in tables)
            np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)


def _floats(table: Any, dtype: Any) -> Any:
    """The values of some rows, as float32 [T, D]."""
    import pyarrow as pa

    column = pa.concat_arrays(table.column("values").chunks)
    flat = np.frombuffer(column.buffers()[1], np.uint8).view(dtype)
    rows = flat.astype(np.float32, copy=False).reshape(column.offset + len(column), -1)
    return rows[column.offset :]


def run_diff(train: Path, serve: Path, workers: int | None = None) -> None:
    """The diff."""
    from eagle_trace_analysis import diff
    from eagle_trace_analysis.comparison.fold import Threads

    result = diff(open_trace(train), open_trace(serve), executor=Threads(workers))
    if result.verdict != "agree":
        raise SystemExit(f"the benchmark's traces should agree: {result.first_divergence or result.incomparable}")


@dataclass(frozen=True)
class Taken:
    """What a piece of work took: seconds, seconds of all cores, and peak memory of its process in MB."""

    wall: float
    cpu: float
    peak: float

    @classmethod
    def least(cls, several: Iterable[Taken]) -> Taken:
        """The fastest, in the memory of the largest."""
        every = list(several)
        return cls(min(one.wall for one in every), min(one.cpu for one in every), max(one.peak for one in every))


def _child(work: Callable[[Path, Path], None], train: Path, serve: Path, connection: Any) -> None:
    # the first pass warms the page cache and the imports
    work(train, serve)
    taken = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        work(train, serve)
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    # not getrusage: its maximum starts from the parent's size at the time of the fork
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
    connection.send(Taken.least(Taken(*times, peak) for times in taken))


def measure(work: Callable[[Path, Path], None], train: Path, serve: Path) -> Taken:
    """What `work` takes in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, train, serve, sender))
    process.start()
    sender.close()
    taken: Taken = receiver.recv()
    process.join()
    return taken


def compare_at(size: int, folder: Path, options: argparse.Namespace) -> None:
    """Print one line for a pair of `size` MB."""
    row_bytes = sum(site_widths(options.hidden).values()) * DTYPES[options.dtype].itemsize
    rows = max(1, int(size * 1e6 / row_bytes / 2))
    pair = folder / f"train-{size}.trace", folder / f"serve-{size}.trace"
    for path, side in zip(pair, ("train", "serve"), strict=True):
        make_trace(path, side, rows, options.hidden, options.dtype)
    works = (bare_pass, partial(run_diff, workers=1), partial(run_diff, workers=options.workers))
    rounds = [[measure(work, *pair) for work in works] for _ in range(ROUNDS)]
    bare, *diffs = (Taken.least(found) for found in zip(*rounds, strict=True))
    total = 2 * rows * row_bytes / 1e9
    print(
        f"{total * 1e3:8.0f} {rows:7d} | {bare.wall:7.2f} {bare.cpu:7.2f} {total / bare.wall:6.2f} {bare.peak:6.0f}",
        *(
            f"{one.wall:7.2f} {one.cpu:7.2f} {one.peak:6.0f} {bare.wall / one.wall:6.2f} {bare.cpu / one.cpu:7.2f}"
            for one in diffs
        ),
        sep=" | ",
        flush=True,
    )
    for path in pair:
        shutil.rmtree(path)


def main() -> None:
    """Print one line a trace size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[100, 400], help="MB of values on both sides")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--workers", type=int, help="threads of the diff (default: as many as cores)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the pair of short captures; 0 for none")
    parser.add_argument("--folder", type=Path, help="where to put the traces (default: a temporary folder)")
    options = parser.parse_args()
    # as `eagle-trace diff` does; the pass by hand calls no BLAS
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        print(f"{options.dtype}, hidden {options.hidden}; peak memory includes Python itself")
        print(f"{'':16} | {'bare numpy pass':>29} | {'diff, one thread':>37} | {'diff, threads':>37}")
        print(
            f"{'pair MB':>8} {'rows':>7} | {'s':>7} {'cpu s':>7} {'GB/s':>6} {'MB':>6}",
            *[f"{'s':>7} {'cpu s':>7} {'MB':>6} {'ratio':>6} {'cpu':>7}"] * 2,
            sep=" | ",
        )
        for size in options.sizes:
            compare_at(size, Path(temporary), options)
        if options.rows:
            pair = Path(temporary) / "train.trace", Path(temporary) / "serve.trace"
            for path, side in zip(pair, ("train", "serve"), strict=True):
                make_short(path, side, options.rows)
            taken = measure(partial(run_diff, workers=options.workers), *pair)
            print(f"{options.rows} rows at 57 sites: {taken.wall:.2f} s, cpu {taken.cpu:.2f} s, {taken.peak:.0f} MB")


if __name__ == "__main__":
    main()
