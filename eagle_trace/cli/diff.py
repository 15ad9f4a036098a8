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
    from eagle_trace.reader import Trace
    from eagle_trace_analysis import Diff
    from eagle_trace_analysis.comparison.fold import Executor


class Format(StrEnum):
    """Formats of a report."""

    text = "text"
    json = "json"
    html = "html"
    junit = "junit"
    sarif = "sarif"


class Sites(StrEnum):
    """Which sites the table of the text report lists."""

    all = "all"
    diverged = "diverged"


#: how ``--help`` groups the options
WRITE, JUDGE, WHERE, RUN = "What is written", "What is asked of it", "What is read", "What compares"
#: what `compare` asks in the same words
ToleranceOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=JUDGE, metavar="TIMES", min=1.0, max=1e6,
        help="How many times its rounding floor the error of a site may be.",
    ),
]  # fmt: skip
MaxDropOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=JUDGE,
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="Fail if the accept length is lower than predicted by more than this share, e.g. 0.05.",
        show_default=False,
    ),
]


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
        typer.Option(
            rich_help_panel=WRITE,
            metavar="FORMAT",
            help="text; html: one file with plots, needs --out; json: for programs; junit, sarif: for a build.",
        ),
    ] = Format.text,
    sites: Annotated[
        Sites, typer.Option(rich_help_panel=WRITE, help="text: sites in the table, those that diverged or all.")
    ] = Sites.diverged,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=WRITE, help="Write the report to this file.", show_default=False)
    ] = None,
    minimum_share: Annotated[
        float,
        typer.Option(
            rich_help_panel=JUDGE,
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of OTHER's comparable rows that must be matched to agree.",
        ),
    ] = 0.5,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", rich_help_panel=JUDGE, help="Look for the cause, too.")
    ] = True,
    train_draft: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WHERE,
            help="Draft of REFERENCE (the trained one), if no longer where its trace says.",
            show_default=False,
        ),
    ] = None,
    serve_draft: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WHERE,
            help="Draft of OTHER (the deployed one), if no longer where its trace says.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(rich_help_panel=WHERE, help="Target, if no longer where the traces say.", show_default=False),
    ] = None,
    floors: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=JUDGE,
            metavar="TRACE",
            help="Two servers: a train trace of the same draft that lends its measured rounding floors.",
            show_default=False,
        ),
    ] = None,
    tolerance: ToleranceOption = 4.0,
    max_drop: MaxDropOption = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=JUDGE,
            metavar="TRACE",
            help="A trace of OTHER's kind from when all was well: fail only for what is worse than in it.",
            show_default=False,
        ),
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", rich_help_panel=WHERE, help="Read what is whole of a trace.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=RUN,
            min=1,
            help="Threads that compare values; as many as there are cores if not set.",
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            metavar="URL",
            help="Compare on this Dask cluster (tcp://host:8786) instead.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=WRITE, help="text: all that was compared, ruled out and not tested, too."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", rich_help_panel=WRITE, help="Replace --out if it exists.")] = False,
) -> None:
    """Compare two traces and name the first place where they part.

    A training with a server, two servers (releases, options, precisions, a healthy and a faulty one), or two
    trainings: docs/two-traces.md.

    Exit status: 0 the traces agree, 1 they diverge, 2 they could not be compared. With --max-drop also 1 for a lost
    accept length; with --baseline 1 only for what is worse than it (docs/gate.md).
    """
    # small matrices only: threads of BLAS would spin, on a busy machine for longer than they compute
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    check_out(out, force=force)
    if workers is not None and scheduler is not None:
        raise UsageError("--workers counts threads of this machine and --scheduler names a cluster: give one of them")
    if format is Format.html:
        from eagle_trace_analysis.report.html import require_plotly

        if out is None:
            raise UsageError("--format html needs a file to write to: --out report.html")
        require_plotly()
    from eagle_trace.reader import open_trace
    from eagle_trace_analysis.pairing.roles import in_order

    train, serve = in_order(*(open_trace(path, allow_partial=allow_partial) for path in (reference, other)))
    others = [open_trace(path, allow_partial=allow_partial) if path else None for path in (floors, baseline)]
    for folder in (train_draft, serve_draft, target):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: give the folder of a checkpoint")
    if train.side == "train" and serve.side == "serve":
        from eagle_trace_analysis.checkpoint.purpose import refuse_swapped

        refuse_swapped(("--train-draft", train_draft), ("--serve-draft", serve_draft), [serve.manifest.host])
    from eagle_trace_analysis.gate.compared import Compare

    with _executor(workers, scheduler) as executor:
        compare = Compare(
            minimum_share=minimum_share, executor=executor, floors=others[0], tolerance=tolerance, max_drop=max_drop,
            diagnose=diagnose, folders=(train_draft, serve_draft, target),
        )  # fmt: skip
        result = compare(train, serve, baseline=others[1])
    if format is Format.text and out is None:
        _print(result, train, serve, sites=sites.value, verbose=verbose)
    else:
        _write(result, train, serve, format, out, sites=sites.value)
    raise typer.Exit(result.exit_status)


def _print(result: Diff, train: Trace, serve: Trace, *, sites: str, verbose: bool) -> None:
    from eagle_trace_analysis.report.ending import next_command
    from eagle_trace_analysis.report.text import print_diff

    print_diff(result, sites=sites, verbose=verbose, next_command=next_command(result, train, serve))


def _write(result: Diff, train: Trace, serve: Trace, format: Format, out: Path | None, *, sites: str) -> None:
    """The report in a format for programs or files, to `out` or to standard output."""
    text = render_as(result, train, serve, format, sites=sites)
    if out is None:
        sys.stdout.write(text)
        return
    write_report(out, text)
    if format is not Format.json:
        from eagle_trace_analysis.report.ending import next_command
        from eagle_trace_analysis.report.text import print_ending

        print_ending(result, next_command=next_command(result, train, serve))


def render_as(result: Diff, train: Trace, serve: Trace, format: Format, *, sites: str = "diverged") -> str:
    """A diff of two traces in one of the formats."""
    if format is Format.html:
        from eagle_trace_analysis.report.html import render_html

        return render_html(result, train=train, serve=serve)
    if format is Format.json:
        from eagle_trace_analysis.report.json import to_json_text

        return to_json_text(result)
    if format is Format.text:
        from eagle_trace_analysis.report.text import render

        return render(result, sites=sites)
    from eagle_trace_analysis.report.cases import cases_of_diff
    from eagle_trace_analysis.report.junit import to_junit
    from eagle_trace_analysis.report.sarif import to_sarif

    suite = cases_of_diff(result)
    return to_junit(suite) if format is Format.junit else to_sarif(suite, exit_status=result.exit_status)


def _executor(workers: int | None, scheduler: str | None) -> AbstractContextManager[Executor]:
    from eagle_trace_analysis.comparison.fold import Dask, Threads

    return nullcontext(Threads(workers)) if scheduler is None else Dask(scheduler)


def check_out(out: Path | None, *, force: bool) -> None:
    """Raises OutputExistsError or UsageError before the comparison, not after it, if no report can be written there."""
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
