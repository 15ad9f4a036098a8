"""`eagle-trace compare`: the main job in one command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_trace.cli.check import CheckFormat, render_check_as
from eagle_trace.cli.diff import (
    JUDGE,
    WRITE,
    Format,
    MaxDropOption,
    ToleranceOption,
    check_out,
    render_as,
    write_report,
)
from eagle_trace.cli.progress import Progress
from eagle_trace.cli.record import ADMIN_KEY, API_KEY, Level
from eagle_trace.errors import EagleTraceError, HostError, UsageError
from eagle_trace.printable import printable

if TYPE_CHECKING:
    from eagle_trace.jobs.comparison import Asked, Judged
    from eagle_trace.jobs.workspace import Workspace
    from eagle_trace.reader import Trace
    from eagle_trace_analysis import Diff
    from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding

#: how ``--help`` groups the options
WHAT, WHERE, ASK = "What to compare", "Where it is served", "How the server is asked"
Reports = Sequence[tuple[Path, Format]]


def compare(
    target: Annotated[
        Path, typer.Option(rich_help_panel=WHAT, help="Target checkpoint, Hugging Face format.", show_default=False)
    ],
    trained: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="Draft as it was trained (speculators format). Without it, the deployed folder is its own reference.",
            show_default=False,
        ),
    ] = None,
    deployed: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="Draft as it is served (in a server's format). Without it, TRAINED is exported.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="JSON lines with prompt, messages or input_ids. Without it: eight of our own.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=WHERE, help="Server to start; two are compared with each other.", show_default=False
        ),
    ] = None,
    env: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel=WHERE,
            metavar="PYTHON",
            help="Python of another environment: --host is started there if it is installed there; without --host, "
            "the server that is.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WHERE,
            metavar="SERVER_URL",
            help="A server that runs already, started with EAGLE_TRACE_OUT=FOLDER.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(rich_help_panel=WHERE, help="against: the server's API key.", envvar=API_KEY)
    ] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(rich_help_panel=WHERE, help="against: the server's admin key.", envvar=ADMIN_KEY)
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel=WRITE,
            help="Write this file, too: .html, .json, .txt, .xml (JUnit) or .sarif. May be given several times.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=WRITE, help="Keep traces and the exported draft in this folder.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(rich_help_panel=ASK, min=1, help="Draft steps.")] = 3,
    topk: Annotated[int, typer.Option(rich_help_panel=ASK, min=1, help="Branches of the draft tree (1: a chain).")] = 1,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=ASK, min=1, help="Tokens verified at once. Default: steps + 1.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(rich_help_panel=ASK, help="float32, float16, bfloat16, or auto: the checkpoint's own.")
    ] = "auto",
    device: Annotated[str, typer.Option(rich_help_panel=ASK, help="auto, cpu or cuda.")] = "auto",
    temperature: Annotated[float, typer.Option(rich_help_panel=ASK, min=0.0, help="0 for greedy answers.")] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option(rich_help_panel=ASK, min=1, help="Tokens to answer to each prompt.")
    ] = 48,
    batch_size: Annotated[int, typer.Option(rich_help_panel=ASK, min=1, help="Prompts sent at once.")] = 8,
    level: Annotated[
        Level,
        typer.Option(
            rich_help_panel=ASK,
            help="How much to keep of each row: shapes, stats, sketch or values.",
            metavar="LEVEL",
        ),
    ] = Level.values,
    minimum_share: Annotated[
        float,
        typer.Option(
            rich_help_panel=JUDGE,
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of the server's comparable rows that must be matched to agree.",
        ),
    ] = 0.5,
    tolerance: ToleranceOption = 4.0,
    max_drop: MaxDropOption = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=JUDGE,
            metavar="TRACE",
            help="A trace of this server from when all was well: fail only for what is worse than in it.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            rich_help_panel=WRITE,
            help="All that was checked, compared, ruled out and not tested, too.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel=WRITE, help="Replace --report if it exists.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", rich_help_panel=WRITE, help="Show no progress.")] = False,
    server_args: Annotated[
        list[str] | None, typer.Argument(help="After --, arguments for the server itself.", metavar="-- SERVER ARGS")
    ] = None,
) -> None:
    """Check a draft, record it where it is served, replay it where it was trained, and name where they part.

    Stops before anything runs if a check fails that no server gets over. What a killed run recorded is used again.

    Exit status: 0 they agree, 1 they diverge or such a check failed, 2 they could not be compared; with --max-drop and
    --baseline as `eagle-trace diff` (docs/gate.md).
    """
    # small matrices only: threads of BLAS would spin, on a busy machine for longer than they compute
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from eagle_trace.jobs.comparison import Asked, Judged
    from eagle_trace.jobs.servers import Ask, servers_of
    from eagle_trace.jobs.workspace import open_workspace
    from eagle_trace.manifest import without_secrets

    reports = [(path, _format_of(path, force=force)) for path in report or ()]
    servers = servers_of(host or (), env or (), against, {"api_key": api_key, "admin_api_key": admin_api_key})
    ask = Ask(
        steps, topk, draft_tokens, dtype, device, max_new_tokens, batch_size, temperature, level.value,
        tuple(server_args or ()),
    )  # fmt: skip
    asked = Asked(target, trained, deployed, prompts, tuple(servers), ask, tuple(without_secrets(sys.argv)))
    asked.check()
    judged = Judged(minimum_share, tolerance, max_drop, baseline)
    if baseline is not None:
        from eagle_trace.reader import open_trace

        open_trace(baseline)  # found out now, not after the recording
    with open_workspace(keep, asked.identity()) as workspace:
        result = _run(asked, workspace, judged, reports, quiet=quiet, verbose=verbose)
        status = result if isinstance(result, int) else _tell(result, workspace, reports, verbose=verbose)
    raise typer.Exit(status)


def _format_of(path: Path, *, force: bool) -> Format:
    """Format of a report by its file's name; refused now where it cannot be written."""
    found = {
        ".html": Format.html,
        ".json": Format.json,
        ".txt": Format.text,
        ".xml": Format.junit,
        ".sarif": Format.sarif,
    }
    if path.suffix not in found:
        raise UsageError(f"--report {path}: the name says the format, and ends in {', '.join(found)}")
    check_out(path, force=force)
    if path.suffix == ".html":
        from eagle_trace_analysis.report.html import require_plotly

        require_plotly()
    return found[path.suffix]


def _run(
    asked: Asked, workspace: Workspace, judged: Judged, reports: Reports, *, quiet: bool, verbose: bool
) -> int | tuple[Diff, Trace, Trace]:
    """Check, record, compare; an exit status where a check stops it."""
    from eagle_trace.jobs.comparison import Comparison, pointless

    with Progress(quiet) as progress:
        comparison = Comparison(asked, workspace, progress)
        progress("checking the draft")
        checked = comparison.check()
        progress.clear()
        for one in checked:
            _tell_check(one, verbose=verbose, named=len(checked) > 1)
        if found := pointless(checked):
            stopped = next(one for one in checked if pointless([one]))
            for path, format in reports:
                if format in (Format.junit, Format.sarif):
                    write_report(path, render_check_as(stopped, CheckFormat(format.value)))
            _tell_stopped(found)
            return 1
        try:
            reference, other = comparison.record()
        except EagleTraceError as error:
            progress.clear()
            raise _explained(error, checked, workspace) from error
        except KeyboardInterrupt as error:
            for words in _left(workspace):
                error.add_note(words)
            raise
        return comparison.diff(reference, other, judged), reference, other


def _tell_check(checked: CheckResult, *, verbose: bool, named: bool) -> None:
    from eagle_trace.terminal import PlainConsole
    from eagle_trace_analysis.report.check import render_brief, render_text

    console = PlainConsole()
    if named and not verbose:
        console.print(f"for {checked.engine}:")
    (render_text if verbose else render_brief)(checked, console)
    console.print()


def _tell_stopped(found: list[Finding]) -> None:
    from eagle_trace.terminal import PlainConsole
    from eagle_trace_analysis.report.check import render_stop

    render_stop(found, PlainConsole())


def _explained(error: EagleTraceError, checked: Sequence[CheckResult], workspace: Workspace) -> EagleTraceError:
    """A recording that failed, with what the checks have to say of it, and what is kept of the run."""
    from eagle_trace.jobs.comparison import failures

    words = [str(error)]
    if isinstance(error, HostError) and checked:
        found = failures(checked)
        words += [f"what check says of it: {one.name}: {one.evidence}\nfix: {one.fix}" for one in found]
        if not found:
            words.append("check finds nothing in the draft that would stop a server: what it printed above says more")
    return type(error)("\n".join([*words, *(f"{one[0].upper()}{one[1:]}" for one in _left(workspace))]))


def _left(workspace: Workspace) -> list[str]:
    """What a run that ends before its time leaves behind, in a sentence; nothing where that is nothing."""
    if workspace.kept or not any(workspace.folder.glob("*.inputs.json")):
        return []
    return [f"what was recorded is kept in {workspace.folder}: the same command goes on from there"]


def _tell(result: tuple[Diff, Trace, Trace], workspace: Workspace, reports: Reports, *, verbose: bool) -> int:
    from eagle_trace_analysis.report.ending import next_command
    from eagle_trace_analysis.report.text import print_diff

    diff, reference, other = result
    for path, format in reports:
        write_report(path, render_as(diff, reference, other, format))
    if workspace.kept:
        typer.echo(printable(f"Traces are kept in {workspace.folder}"), err=True)
        after = next_command(diff, reference, other)
    else:
        after = _again(diff)
    print_diff(diff, verbose=verbose, next_command=after)
    return diff.exit_status


def _again(diff: Diff) -> str:
    """What to do where no trace was kept: mend what was found, or keep the traces to look into them."""
    if diff.diagnosis is not None and diff.diagnosis.confirmed:
        return "mend it and run this again; --verbose says more, --keep DIR keeps traces"
    from eagle_trace.manifest import without_secrets

    words = [word for word in without_secrets(sys.argv)[1:] if word != "--quiet"]
    at = words.index("compare") + 1 if "compare" in words else 0
    # a report that was written now would be in the way
    again = ["--force"] if any(word.startswith("--report") for word in words) and "--force" not in words else []
    return shlex.join(["eagle-trace", *words[:at], "--keep", "compared", *again, *words[at:]])
