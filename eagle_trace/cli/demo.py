"""`eagle-trace demo`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from eagle_trace.errors import OutputExistsError, RecordingError


def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep the traces in this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Record and diff two tiny drafts that ship with eagle-trace, deployed right and wrong (about three minutes)."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise OutputExistsError(f"{keep} exists: choose another --keep")
        _run(keep, quiet, kept=True)
        return
    with tempfile.TemporaryDirectory(prefix="eagle-trace-demo-") as folder:
        _run(Path(folder), quiet, kept=False)


def _run(folder: Path, quiet: bool, *, kept: bool) -> None:
    from eagle_trace.cli.progress import Progress
    from eagle_trace.demo.run import KIMI, LLAMA, diff_all, record_all
    from eagle_trace_analysis.report.text import print_diff

    started = time.monotonic()
    with Progress(quiet) as progress:
        traces = [record_all(folder, progress, pair) for pair in (LLAMA, KIMI)]
    (healthy, broken), (kimi_healthy, kimi_broken) = (diff_all(one) for one in traces)
    typer.echo("\n── 1. A draft of a small Llama, deployed as it was trained ──\n")
    print_diff(healthy, verbose=False)
    typer.echo("\n── 2. The same draft, but the server feeds it one target layer instead of three ──\n")
    print_diff(broken, verbose=False)
    typer.echo("\n── 3. A draft of a tiny Kimi-K2.5 (KimiK25ForConditionalGeneration), deployed as it was trained ──\n")
    print_diff(kimi_healthy, verbose=False)
    typer.echo("\n── 4. The same draft, fed one target layer: the case that this tool was born from ──\n")
    print_diff(kimi_broken, verbose=False)
    typer.echo(f"\nRecorded and diffed in {time.monotonic() - started:.0f} s.")
    if kept:
        typer.echo("Wrote " + " and ".join(f"{one.train}, {one.healthy}, {one.broken}" for one in traces))
        typer.echo(f"Next: eagle-trace diff {traces[1].train} {traces[1].broken}")
    else:
        typer.echo("Next: eagle-trace demo --keep demo   (keeps the traces, to diff and look at them yourself)")
    parted = [one.first_divergence and one.first_divergence.site for one in (broken, kimi_broken)]
    if (healthy.verdict, kimi_healthy.verdict) != ("agree", "agree") or parted != ["fused", "fused"]:
        raise RecordingError("the demo did not come out as it must: please report this with the output above")
