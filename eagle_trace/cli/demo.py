"""`eagle-trace demo`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from eagle_trace.cli.said import next_line, say
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


def _head(title: str) -> None:
    typer.echo(f"\n── {title} ──\n")


def _run(folder: Path, quiet: bool, *, kept: bool) -> None:
    from eagle_trace.cli.progress import Progress
    from eagle_trace.demo.run import KIMI, LLAMA, diff_all, record_all
    from eagle_trace_analysis.report.text import print_diff

    started = time.monotonic()
    with Progress(quiet) as progress:
        traces = [record_all(folder, progress, pair) for pair in (LLAMA, KIMI)]
    (healthy, broken), (kimi_healthy, kimi_broken) = (diff_all(one) for one in traces)
    _head("1. A draft of a small Llama, deployed as it was trained")
    print_diff(healthy, verbose=False)
    _head("2. The same draft, but the server feeds it one target layer, not three")
    print_diff(broken, verbose=False)
    _head("3. A draft of a tiny Kimi-K2.5, deployed as it was trained")
    print_diff(kimi_healthy, verbose=False)
    _head("4. The same draft, fed one target layer: the case this tool was born from")
    print_diff(kimi_broken, verbose=False)
    typer.echo(f"\nRecorded and diffed in {time.monotonic() - started:.0f} s.")
    if kept:
        say("Wrote " + " and ".join(f"{one.train}, {one.healthy}, {one.broken}" for one in traces))
        typer.echo(next_line(f"eagle-trace diff {traces[1].train} {traces[1].broken}"))
    else:
        typer.echo("To keep the traces, and diff and look at them yourself:")
        typer.echo(next_line("eagle-trace demo --keep demo"))
    parted = [one.first_divergence and one.first_divergence.site for one in (broken, kimi_broken)]
    if (healthy.verdict, kimi_healthy.verdict) != ("agree", "agree") or parted != ["fused", "fused"]:
        raise RecordingError("the demo did not come out as it must: please report this with the output above")
