"""What a terminal report ends with: verdict, cause, fix and the next command, in at most twelve lines.

It is what the eye lands on, so nothing in it is a table and nothing in it goes on for ever: what is cut here is said in
full above it, or with `--verbose`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from eagle_trace.printable import printable
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.result import AcceptLength, Diff
from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, Diagnosis
from eagle_trace_analysis.report.lines import LEAST, wrapped

#: lines of the ending, and what of a cause is said in it
MOST_LINES = 12
_EVIDENCE, _FIX = 3, 3
STYLE = {"agree": "bold green", "diverged": "bold red", "incomparable": "bold yellow"}


def ending(diff: Diff, answer: Sequence[Text], console: Console, next_command: str = "") -> list[Text]:
    """The last lines of a report.

    Args:
        diff: a finished diff.
        answer: its first lines: verdict, both sides or the largest error, coverage.
        console: what it is printed to; its width decides where sentences are cut.
        next_command: what to do next; nothing if empty.
    """
    lines = [one for one in answer if one.plain]
    if diff.incomparable is not None:
        lines = [lines[0], *_cut(diff.incomparable, console, MOST_LINES - 6, indent=0), *lines[2:]]
    if (accept := accept_line(diff)) and diff.incomparable is None:
        lines.append(Text(accept))
    last = [*_gate(diff, console), *(_next(next_command, console) if next_command else [])]
    if diff.diagnosis is not None:
        lines += _causes(diff.diagnosis, console, MOST_LINES - len(lines) - len(last), diff.verdict)
    return [*lines, *last]


def holds_all(diff: Diff, lines: Sequence[Text]) -> bool:
    """Whether `lines`, an ending, say all there is of the confirmed causes and of what none of them explains."""
    if diff.diagnosis is None:
        return True
    said = [line.plain for line in lines]
    named = {line.removeprefix("cause: ").split("  ")[0] for line in said if line.startswith("cause: ")}
    causes = [at for at, line in enumerate(said) if line.startswith("cause: ")]
    cut = any(line.endswith(" ...") for line in said[min(causes, default=0) :])
    return not cut and not diff.diagnosis.unexplained and named == {one.cause for one in diff.diagnosis.confirmed}


def accept_line(diff: Diff) -> str:
    """Accept lengths in one line; empty where the server's is not known."""
    accept = diff.accept_length
    if accept.observed is None:
        return ""
    if accept.reference is not None:
        a, b = diff.roles.reference, diff.roles.other
        return f"accept length: {accept.reference:.2f} in {a}, {accept.observed:.2f} in {b}"
    return f"accept length: {accept.observed:.2f} in serving{_predicted(accept)}"


def _predicted(accept: AcceptLength) -> str:
    if accept.predicted is None:
        return ""
    chain = "" if accept.comparable else " for a chain"
    low, high = accept.predicted_range or (accept.predicted, accept.predicted)
    figure = f"{low:.2f}" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f}"
    return f", {figure} predicted by the training forward{chain}"


def _causes(diagnosis: Diagnosis, console: Console, room: int, verdict: str) -> list[Text]:
    """The first confirmed causes with their fixes, or that there is none, in `room` lines."""
    confirmed = diagnosis.confirmed
    counts = f"{len(diagnosis.of('ruled_out'))} ruled out, {len(diagnosis.of('not_tested'))} not tested"
    if not confirmed:
        words = f"causes: none confirmed, {counts}"
        if verdict == "diverged":
            words = f"no known cause explains it ({counts})"
        return [Text(words, style="bold" if verdict == "diverged" else "")]
    lines: list[Text] = []
    for number, one in enumerate(confirmed):
        left = len(confirmed) - number
        # each cause that follows needs its name and its fix; room for a line that says how many are left
        mine = _cause(one, console, room - len(lines) - (left > 1), counts if not number else "", more=left > 1)
        if not mine:
            lines.append(
                Text(f"and {left} more confirmed: {', '.join(c.cause for c in confirmed[number:])}"[: console.width])
            )
            break
        lines += mine
    return lines


def _cause(one: CauseVerdict, console: Console, room: int, counts: str, *, more: bool) -> list[Text]:
    if room < 2:
        return []
    title = Text().append(f"cause: {one.cause}", style="bold red")
    if counts:
        title.append(f"  ({counts})", style="dim")
    fix = _cut(f"fix: {one.fix}", console, min(_FIX, room - 1), style="bold")
    evidence = _cut(one.evidence, console, min(1 if more else _EVIDENCE, room - 1 - len(fix)))
    return [title, *evidence, *fix]


def _cut(text: str, console: Console, most: int, *, style: str = "", indent: int = 2) -> list[Text]:
    """`text` in at most `most` lines, with dots where it goes on."""
    if most < 1:
        return []
    parts = wrapped(console, text, indent)
    if len(parts) > most:
        room = max(LEAST, console.width - indent) - 4
        parts = [*parts[: most - 1], f"{parts[most - 1][:room].rstrip()} ..."]
    return [Text(" " * indent) + Text(part, style=style) for part in parts]


def _gate(diff: Diff, console: Console) -> list[Text]:
    """What was asked beyond agreement, and whether it holds, in one line or two."""
    gate = diff.gate
    if gate is None or diff.incomparable is not None:
        return []
    if gate.failures:
        more = f" ({len(gate.failures)} things, this first)" if len(gate.failures) > 1 else ""
        return _cut(f"gate: failed{more}: {gate.failures[0].text}", console, 2, style="bold red", indent=0)
    if gate.unknown is not None:
        return _cut(f"gate: not known: {gate.unknown}", console, 2, style="bold yellow", indent=0)
    asked = [f"accept length within {gate.max_drop:.1%}"] if gate.max_drop is not None else []
    asked += ["nothing worse than in the baseline"] if gate.baseline is not None else []
    return [Text(f"gate: passed: {' and '.join(asked)}", style="bold green")]


def _next(command: str, console: Console) -> list[Text]:
    """The next command, which is never cut: it is there to be copied. Too long a one has a line of its own."""
    line = Text().append("next: ", style="bold").append(printable(command))
    if line.cell_len <= console.width:
        return [line]
    return [Text("next:", style="bold"), Text(f"  {printable(command)}")]


def next_command(diff: Diff, reference: Trace, other: Trace) -> str:
    """What to type after reading a report of these two traces."""
    first = diff.first_divergence
    a, b = str(reference.path), str(other.path)
    if diff.incomparable is not None:
        return _command("show", b)
    if diff.diagnosis is not None and diff.diagnosis.confirmed:
        return _command("diff", a, b, "--verbose")
    if first is not None and first.row is not None and first.kind in ("values", "nonfinite", "step"):
        row = first.row
        return _command(
            "show", b, "--site", first.site, "--prompt", row.serve_prompt_id, "--root", row.root, "--step", row.step
        )
    return _command("diff", a, b, "--verbose")


def _command(*words: object) -> str:
    return shlex.join(["eagle-trace", *map(str, words)])
