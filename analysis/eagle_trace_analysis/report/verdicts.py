"""A diagnosis as text: confirmed causes with their fix, what was ruled out, what was not tested."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, Diagnosis
from eagle_trace_analysis.pairing.roles import Roles
from eagle_trace_analysis.replay.replay import Replayed
from eagle_trace_analysis.report.lines import INDENT, hang, section

NAME_WIDTH = 26


def print_confirmed(diagnosis: Diagnosis, console: Console) -> None:
    """The causes that are proved, first in the forward first, and what none of them explains."""
    for number, one in enumerate(diagnosis.confirmed, start=1):
        title = f"cause {number}: " if len(diagnosis.confirmed) > 1 else "cause: "
        console.print(Text(f"{title}{one.cause}", style="bold red"))
        hang(console, one.evidence)
        hang(console, f"fix: {one.fix}", style="bold")
        console.print()
    if diagnosis.unexplained:
        title = "not explained by it" if diagnosis.confirmed else "no known cause explains it"
        section(console, title, diagnosis.unexplained)
        console.print()


def print_rest(diagnosis: Diagnosis, console: Console, *, whole: bool, roles: Roles | None = None) -> None:
    """What was ruled out and what was not tested; the counts alone unless `whole`."""
    out, left = diagnosis.of("ruled_out"), diagnosis.of("not_tested")
    if not whole:
        text = f"causes: {len(diagnosis.confirmed)} confirmed, {len(out)} ruled out, {len(left)} not tested"
        console.print(Text(text, style="bold"))
        console.print()
        return
    if out:
        console.print(Text(f"ruled out ({len(out)})", style="bold"))
        for one in out:
            hang(console, one.evidence, _named(one))
        console.print()
    if left:
        console.print(Text(f"not tested ({len(left)})", style="bold"))
        for one in left:
            hang(console, _untested(one), _named(one))
        console.print()
    lines = list(replay_lines(diagnosis.replay))
    if lines:
        section(console, "every step by itself", [roles.say(line) if roles is not None else line for line in lines])
        console.print()


def _named(one: CauseVerdict) -> str:
    return f"{' ' * INDENT}{one.cause:{NAME_WIDTH}}"


def _untested(one: CauseVerdict) -> str:
    return f"{one.evidence}; to test it: {one.fix}" if one.fix else one.evidence


def replay_lines(replay: tuple[Replayed, ...]) -> Iterator[str]:
    """How many steps follow from their own inputs, and how small a fault would have been seen; nothing if none was
    recomputed.
    """
    counts = {name: sum(one.verdict == name for one in replay) for name in ("reproduced", "faulty", "not replayed")}
    if counts["reproduced"] + counts["faulty"]:
        text = f"{counts['reproduced']} of {len(replay)} steps of the server follow from its own inputs as trained"
        names = list(dict.fromkeys(one.site for one in replay if one.verdict == "faulty"))
        text += f"; not so {', '.join(names)}" if names else ""
        yield text + (f" ({counts['not replayed']} not recomputed)" if counts["not replayed"] else "")
    seen = [
        (abs(found.coherent), found.limits.coherent, one)
        for one in replay
        if one.verdict == "reproduced"
        and one.serve is not None
        and (found := one.serve.systematic) is not None
        # what is larger stands on too few rows to be anything
        and abs(found.coherent) <= found.limits.coherent
    ]
    if seen:
        share, limit, worst = max(seen, key=lambda item: item[0] / item[1])
        yield (
            f"the error that follows the inputs, as a fault's does and rounding does not, is at most {share:.1e} "
            f"({worst.site}, step {worst.step}; {limit:.1e} allowed)"
        )
