"""What recording costs a server: CPU time of the same requests, recorded at each level, over not recorded.

    python tests/benchmarks/bench_record.py [TARGET DRAFT [HOST]]

One server is started; every round answers the same prompts without recording and at each level, in turn, so that the
ratios hold on a machine whose speed drifts. CPU time is that of all processes of the server and of this one, from the
first prompt sent to the trace sealed. DRAFT is what HOST loads (sglang, vllm). Without arguments the demo pair is used
on SGLang; docs/walkthrough-smollm2.md says how to make the pair of the figures in the docs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from eagle_trace.capture import DTYPES
from eagle_trace.demo import models_dir, prompts_file
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import open_trace
from eagle_trace.recording.hosts import find_host
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_serving.host import ServerOptions
from eagle_trace_serving.requests import Request
from eagle_trace_serving.server import Server

ROUNDS = 5
LEVELS = ("off", "shapes", "stats", "sketch", "values")


def cpu_seconds() -> float:
    """CPU time of this process and all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def run(server: Server, request: Request, level: str, out: Path) -> tuple[float, float, int, int]:
    """CPU seconds, wall seconds, bytes and files of one pass over the prompts."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    if level == "off":
        server.answer(request)
    else:
        out.mkdir()
        server.record(request, out, level=level)
    spent = cpu_seconds() - cpu, time.perf_counter() - wall
    files = [file for file in out.rglob("*") if file.is_file()]
    return *spent, sum(file.stat().st_size for file in files), len(files)


def raw_bytes(path: Path) -> int:
    """Bytes of all captured values of a trace, as the tensors held them."""
    trace = open_trace(path)
    return sum(
        data.rows * data.width * DTYPES[data.dtype].itemsize for site in trace.sites for data in trace.site_data(site)
    )


def main() -> None:
    """Print a row a level."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        host = find_host("server", sys.argv[3] if len(sys.argv) == 4 else "sglang")
        if len(sys.argv) >= 3:
            target, draft = Path(sys.argv[1]), Path(sys.argv[2])
        else:
            target, draft = models_dir() / "target", scratch / "draft"
            export(models_dir() / "draft", draft, target=target)
        request = Request(read_prompts(prompts_file()), max_new_tokens=48)
        figures: dict[str, list[tuple[float, float, int, int]]] = {level: [] for level in LEVELS}
        with Server(ServerOptions(target, draft, dtype="float32"), host=host) as server:
            server.answer(request)  # warm-up
            for number in range(ROUNDS):
                for level in LEVELS:
                    figures[level].append(run(server, request, level, scratch / f"{level}{number}.trace"))
        raw = raw_bytes(scratch / f"values{ROUNDS - 1}.trace")
    print(
        f"{'level':8} {'CPU s':>8} {'x CPU (median, min-max)':>26} {'wall s':>8} {'MB':>8} {'of raw':>7} {'files':>6}"
    )
    for level in LEVELS:
        ratios = [mine[0] / off[0] for mine, off in zip(figures[level], figures["off"], strict=True)]
        cpu = statistics.median(one[0] for one in figures[level])
        wall = statistics.median(one[1] for one in figures[level])
        size, files = figures[level][-1][2:]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{level:8} {cpu:8.2f} {spread:>26} {wall:8.2f} {size / 1e6:8.2f} {size / raw:7.1%} {files:6}")


if __name__ == "__main__":
    main()
