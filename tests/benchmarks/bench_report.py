"""How large the HTML report of large traces gets, how long it takes to write, and how long Chromium takes to open it.

    python tests/benchmarks/bench_report.py [POSITIONS ...] [--layers 3] [--keep DIR]

Aims: under 10 MB and under 3 s for 10,000 positions. Rows are narrow, so that the figures are the report's own. Opening
is until the load event (the first screen is there); `drawn` is until every plot was scrolled to and drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from eagle_trace.capture import Rows
from eagle_trace.manifest import Manifest
from eagle_trace.reader import open_trace
from eagle_trace.sites import draft_sites
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.report.html import render_html
from eagle_trace_analysis.report.show import summary
from tests.support.browser import Page, browser

WIDTH, VOCAB, TOPK, CHUNK = 16, 64, 10, 500


def make_trace(path: Path, side: str, positions: int, layers: int) -> None:
    """A trace of `positions` rows of step 0 at every site; the serve side is wrong from some positions on."""
    prepare_output(path)
    writer = TraceWriter(
        path, Manifest(side, "values", "bench", dtype="float32", prompts_digest="bench"), max_wait=None
    )  # type: ignore[arg-type]
    sites = [site.name for site in draft_sites(3, layers) if site.kind == "value"]
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, positions, CHUNK)):
        count = min(CHUNK, positions - start)
        tokens = rng.integers(0, VOCAB, count + 1)
        writer.put_record(
            "prompts",
            {"prompt_id": number, "prompt_key": f"p{number}", "token_ids": tokens, "num_prompt_tokens": count,
             "text": f"Prompt number {number} of the benchmark"},
        )  # fmt: skip
        index = np.arange(count, dtype=np.int32)
        keys = Rows.build(
            prompt_id=np.full(count, number, np.int32), root=index, step=np.zeros(count, np.int32),
            token_id=tokens[1:].astype(np.int32), position=index, call_id=number,
        )  # fmt: skip
        writer.put_rows(keys)
        for site in sites:
            width = VOCAB if site == "logits" else 3 * WIDTH if site in ("fused", "fc.in") else WIDTH
            values = rng.standard_normal((count, width), dtype=np.float32)
            if side == "serve":
                values *= np.float32(1 + 1e-7) if start < positions / 2 else np.float32(1.05)
            writer.put_values(site, keys, values)
            if site == "logits":
                best = np.argsort(-values, axis=1)[:, :TOPK].astype(np.int32)
                logits = np.take_along_axis(values, best, axis=1)
                writer.put_topk(keys, best, best.astype(np.int64), logits, logits)
    writer.seal()


def open_report(path: Path) -> tuple[float, float]:
    """Seconds until the load event, and until every plot is drawn."""
    with browser() as started:
        page = Page(started.new_page(viewport={"width": 1280, "height": 900}))
        began = time.perf_counter()
        page.open(path)
        loaded = time.perf_counter() - began
        page.draw_all()
        if page.problems:
            raise SystemExit(f"the report complains: {page.problems}")
        return loaded, time.perf_counter() - began


def main() -> None:
    """Print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("positions", nargs="*", type=int, default=[10, 1000, 10_000])
    parser.add_argument("--layers", type=int, default=3, help="decoder layers of the draft (3: 57 sites)")
    parser.add_argument("--keep", type=Path, help="folder for traces and reports (default: a temporary one)")
    options = parser.parse_args()
    print("positions  sites  show s  diff s  html s     MB  open s  drawn s")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for positions in options.positions:
            paths = [folder / f"{side}-{positions}.trace" for side in ("train", "serve")]
            for path, side in zip(paths, ("train", "serve"), strict=True):
                make_trace(path, side, positions, options.layers)
            traces = [open_trace(path) for path in paths]
            began = time.perf_counter()
            summary(open_trace(paths[0]))
            shown = time.perf_counter()
            result = diff(*traces)
            compared = time.perf_counter()
            report = folder / f"report-{positions}.html"
            report.write_text(render_html(result), encoding="utf-8")
            written = time.perf_counter()
            loaded, drawn = open_report(report)
            print(
                f"{positions:9d} {len(traces[0].sites):6d} {shown - began:7.2f} {compared - shown:7.2f} "
                f"{written - compared:7.2f} {report.stat().st_size / 1e6:6.2f} {loaded:7.2f} {drawn:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
