"""`eagle-trace diff`: compare two traces."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_trace.errors import OutputExistsError, UsageError
from eagle_trace.printable import printable

if TYPE_CHECKING:
    from eagle_trace_analysis.comparison.fold import Executor


class Format(StrEnum):
    """Formats of a report."""

    text = "text"
    json = "json"
    html = "html"


class Sites(StrEnum):
    """Which sites the table of the text report lists."""

    all = "all"
    diverged = "diverged"


def diff(
    reference: Annotated[
        str,
        typer.Argument(
            help="Trace that is taken to be right: a folder, or a URL. A train trace is, wherever it stands.",
            show_default=False,
        ),
    ],
    other: Annotated[
        str,
        typer.Argument(help="Trace that is held against it: of a server, or of another trainer.", show_default=False),
    ],
    format: Annotated[
        Format,
        typer.Option(help="text; html: one file with plots, needs --out; json: for programs (docs/diff-json.md)."),
    ] = Format.text,
    sites: Annotated[
        Sites, typer.Option(help="text: sites in the table, those that diverged or all.")
    ] = Sites.diverged,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file.", show_default=False)] = None,
    minimum_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of OTHER's comparable rows that must be matched to agree."),
    ] = 0.5,
    diagnose: Annotated[bool, typer.Option("--diagnose/--no-diagnose", help="Look for the cause, too.")] = True,
    train_draft: Annotated[
        Path | None,
        typer.Option(
            help="Draft of REFERENCE (the trained one), if no longer where its trace says.", show_default=False
        ),
    ] = None,
    serve_draft: Annotated[
        Path | None,
        typer.Option(help="Draft of OTHER (the deployed one), if no longer where its trace says.", show_default=False),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Target, if no longer where the traces say.", show_default=False)
    ] = None,
    floors: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Two servers: a train trace of the same draft that lends its measured rounding floors.",
            show_default=False,
        ),
    ] = None,
    allow_partial: Annotated[bool, typer.Option("--allow-partial", help="Read what is whole of a trace.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads that compare values; as many as there are cores if not set.", show_default=False
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Compare on this Dask cluster (tcp://host:8786) instead.", show_default=False),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="text: all that was compared, ruled out and not tested, too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")] = False,
) -> None:
    """Compare two traces and name the first place where they part.

    A training with a server, two servers (releases, options, precisions, a healthy and a faulty one), or two
    trainings: docs/two-traces.md.

    Exit status: 0 the traces agree, 1 they diverge, 2 they could not be compared.
    """
    # small matrices only: threads of BLAS would spin, on a busy machine for longer than they compute
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from eagle_trace.reader import open_trace
    from eagle_trace_analysis import diff as compare
    from eagle_trace_analysis.report.ending import next_command
    from eagle_trace_analysis.report.json import to_json_text
    from eagle_trace_analysis.report.text import print_diff, print_ending, render

    check_out(out, force=force)
    if workers is not None and scheduler is not None:
        raise UsageError("--workers counts threads of this machine and --scheduler names a cluster: give one of them")
    if format is Format.html:
        from eagle_trace_analysis.report.html import render_html, require_plotly

        if out is None:
            raise UsageError("--format html needs a file to write to: --out report.html")
        require_plotly()
    from eagle_trace_analysis.pairing.roles import in_order

    train, serve = in_order(*(open_trace(path, allow_partial=allow_partial) for path in (reference, other)))
    lent = open_trace(floors, allow_partial=allow_partial) if floors is not None else None
    for folder in (train_draft, serve_draft, target):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is no folder: give the folder of a checkpoint")
    with _executor(workers, scheduler) as executor:
        result = compare(train, serve, minimum_share=minimum_share, executor=executor, floors=lent)
    if diagnose:
        from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed

        result = diagnosed(result, train, serve, Checkpoints(train_draft, serve_draft, target))
    if out is not None:
        if format is Format.html:
            write_report(out, render_html(result, train=train, serve=serve))
            print_ending(result, next_command=next_command(result, train, serve))
        else:
            write_report(out, to_json_text(result) if format is Format.json else render(result, sites=sites.value))
    elif format is Format.json:
        sys.stdout.write(to_json_text(result))
    else:
        print_diff(result, sites=sites.value, verbose=verbose, next_command=next_command(result, train, serve))
    raise typer.Exit(result.exit_status)


def _executor(workers: int | None, scheduler: str | None) -> AbstractContextManager[Executor]:
    from eagle_trace_analysis.comparison.fold import Dask, Threads

    return nullcontext(Threads(workers)) if scheduler is None else Dask(scheduler)


def check_out(out: Path | None, *, force: bool) -> None:
    """Find out before the comparison, not after it, that the report cannot be written (OutputExistsError, UsageError)."""
    if out is None:
        return
    if out.exists() and not force:
        raise OutputExistsError(f"{out} exists: choose another --out, or --force to replace it")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: --out names the file to write the report to")


def write_report(out: Path, text: str) -> None:
    """Write a report and say so on stderr; raises UsageError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(printable(f"Wrote {out}"), err=True)
