"""A check's result as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from eagle_trace.printable import json_text, printable
from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding, Status
from eagle_trace_analysis.report.lines import hang, section

#: mark and style of each status; the word itself is always printed, so that nothing hangs on colour
MARKS = {Status.FAIL: "bold red", Status.WARN: "yellow", Status.PASS: "green", Status.SKIP: "dim"}
NAME_WIDTH = 18


def render_json(result: CheckResult) -> str:
    """The result as one JSON object."""
    return json_text(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))


def render_text(result: CheckResult, console: Console) -> None:
    """Print the findings, those to act upon first, then the changes against the reference."""
    console.print(Text(f"{result.draft} ({result.format} format)", style="bold"))
    if result.trainer:
        console.print(Text(printable(result.trainer), style="dim"))
    console.print(Text(printable(_judged_for(result))))
    for finding in _ordered(result):
        _print_finding(finding, console)
    if result.changes:
        console.print()
        changes = [f"{change.change:8} {change.name}: {change.evidence}" for change in result.changes]
        section(console, f"Changes against {result.reference}", changes)
    console.print()
    console.print(Text(summary(result)))


def render_brief(result: CheckResult, console: Console) -> None:
    """What failed or warned with its fix, and the counts; the counts alone of a draft with which all is well."""
    for finding in _ordered(result):
        if finding.status in (Status.FAIL, Status.WARN):
            _print_finding(finding, console)
    if result.why:
        console.print(Text(printable(_judged_for(result))))
    console.print(Text(f"check: {summary(result)}", style="bold red" if result.exit_status else ""))


def _judged_for(result: CheckResult) -> str:
    """Which engine, and why this one where nobody named it."""
    return f"judged for {result.engine}" + (f": {result.why}" if result.why else "")


def render_stop(found: Sequence[Finding], console: Console) -> None:
    """Why nothing was started: the failed checks (one at least) that no server gets over, each with its fix."""
    first = found[0]
    console.print(Text(f"not run: the check {first.name} failed, and no server gets over that", style="bold red"))
    for finding in found:
        _print_finding(finding, console)
    console.print(Text("next: ", style="bold") + Text("mend it and run this again"), soft_wrap=True)


def summary(result: CheckResult) -> str:
    """One line with the counts."""
    counts = {status: result.count(status) for status in Status}
    line = f"{counts[Status.FAIL]} failed, {counts[Status.WARN]} warned, {counts[Status.PASS]} passed"
    line += f", {counts[Status.SKIP]} not checked" if counts[Status.SKIP] else ""
    return line + (f"; {result.fetched / 1e6:.1f} MB fetched" if result.fetched is not None else "")


def _ordered(result: CheckResult) -> Iterator[Finding]:
    for status in MARKS:
        yield from (finding for finding in result.findings if finding.status is status)


def _print_finding(finding: Finding, console: Console) -> None:
    head = Text(f"{finding.status.value:5}", style=MARKS[finding.status])
    head.append(f"{finding.name:{NAME_WIDTH}}", style="bold" if finding.fix else "")
    hang(console, finding.evidence, head)
    if finding.fix:
        cause = f" [{finding.cause}]" if finding.cause else ""
        hang(console, f"fix{cause}: {finding.fix}", " " * head.cell_len)
