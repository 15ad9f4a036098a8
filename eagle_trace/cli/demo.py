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
    """Record and diff a tiny draft that ships with eagle-trace, deployed right and wrong (about two minutes)."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise OutputExistsError(f"{keep} exists: choose another --keep")
        _run(keep, quiet, kept=True)
        return
    with tempfile.TemporaryDirectory(prefix="eagle-trace-demo-") as folder:
        _run(Path(folder), quiet, kept=False)


def _run(folder: Path, quiet: bool, *, kept: bool) -> None:
    from eagle_trace.cli.progress import Progress
    from eagle_trace.demo.run import diff_all, record_all
    from eagle_trace_analysis.report.text import print_diff

    started = time.monotonic()
    with Progress(quiet) as progress:
        traces = record_all(folder, progress)
    healthy, broken = diff_all(traces)
    typer.echo("\n── 1. The draft deployed as it was trained ──\n")
    print_diff(healthy)
    typer.echo("\n── 2. The same draft, but the server feeds it one target layer instead of three ──\n")
    print_diff(broken)
    typer.echo(f"\nRecorded and diffed in {time.monotonic() - started:.0f} s.")
    if kept:
        typer.echo(f"Wrote {traces.train}, {traces.healthy} and {traces.broken}")
        typer.echo(f"Next: eagle-trace diff {traces.train} {traces.broken}")
    else:
        typer.echo("Next: eagle-trace demo --keep demo   (keeps the traces, to diff and look at them yourself)")
    first = broken.first_divergence
    if healthy.verdict != "agree" or first is None or first.site != "fused":
        raise RecordingError("the demo did not come out as it must: please report this with the output above")
