"""A diff for people: what was found, and at the end the answer, in 80 columns."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from eagle_trace.printable import printable
from eagle_trace.terminal import PlainConsole
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import AcceptLength, Diff, Divergence, SiteResult
from eagle_trace_analysis.diagnosis.diagnose import Diagnosis
from eagle_trace_analysis.pairing.pairs import Coverage, skipped_because
from eagle_trace_analysis.pairing.roles import Roles
from eagle_trace_analysis.report.ending import STYLE, ending, holds_all
from eagle_trace_analysis.report.lines import section
from eagle_trace_analysis.report.site_table import print_sites
from eagle_trace_analysis.report.verdicts import print_confirmed, print_rest, replay_lines

WIDTH = 80
#: rows of the table of sites where not everything was asked for
SHORT = 6
#: notes that change nothing for the reader of the verdict
_QUIET = ("no-checksums", "sketch", "parameters-form")


def render(
    diff: Diff,
    *,
    width: int = WIDTH,
    color: bool = False,
    sites: str = "diverged",
    verbose: bool = True,
    next_command: str = "",
) -> str:
    """The report as text of at most `width` columns; without `color` it is plain.

    `sites` says what the table lists: ``diverged`` sites, or ``all``. Not `verbose`, it holds what a reader acts upon.
    """
    stream = io.StringIO()
    console = PlainConsole(
        file=stream, width=width, force_terminal=color, no_color=not color,
        color_system="standard" if color else None, legacy_windows=False,
    )  # fmt: skip
    print_diff(diff, console, sites=sites, verbose=verbose, next_command=next_command)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_diff(
    diff: Diff,
    console: Console | None = None,
    *,
    sites: str = "diverged",
    verbose: bool = True,
    next_command: str = "",
) -> None:
    """Print the report, to standard output unless another console is given; plain and 80 columns wide if it
    is no terminal. It ends with the verdict, the cause, its fix and `next_command` (`report.ending`).
    """
    if console is None and (console := _terminal()) is None:
        _to_pipe(render(diff, sites=sites, verbose=verbose, next_command=next_command))
        return
    answer, last = _ending(diff, console, next_command)
    cut = [line.plain for line in answer if line.cell_len > console.width]
    _print_before(diff, console, cut, sites=sites, verbose=verbose)
    if diff.diagnosis is not None and (verbose or not holds_all(diff, last)):
        print_confirmed(diff.diagnosis, console)
    _print_lines(last, console)


def print_ending(diff: Diff, console: Console | None = None, *, next_command: str = "") -> None:
    """Print the ending of the report alone, where the whole of it was written elsewhere."""
    if console is None and (console := _terminal()) is None:
        stream = io.StringIO()
        _print_lines(_ending(diff, plain := PlainConsole(file=stream, width=WIDTH), next_command)[1], plain)
        _to_pipe(stream.getvalue())
        return
    _print_lines(_ending(diff, console, next_command)[1], console)


def _terminal() -> Console | None:
    """A console for standard output if that is a terminal."""
    return PlainConsole() if sys.stdout.isatty() else None


def _to_pipe(text: str) -> None:
    # a pipe may be plain ASCII: what it cannot hold is spelled out rather than an error
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _ending(diff: Diff, console: Console, next_command: str) -> tuple[list[Text], list[Text]]:
    """The answer in full, and the ending that holds what of it fits."""
    answer = [_printable(_said(diff.roles, line)) for line in _answer(diff, console.width)]
    return answer, ending(diff, [_fit(line, console.width) for line in answer], console, next_command)


def _print_lines(lines: Iterable[Text], console: Console) -> None:
    for line in lines:
        console.print(line, no_wrap=True, soft_wrap=True)


def _print_before(diff: Diff, console: Console, cut: list[str], *, sites: str, verbose: bool) -> None:
    """All that stands before the ending, what matters most last."""
    roles = diff.roles
    if any(result.metrics or result.divergence for result in diff.sites):
        print_sites(console, diff, sites, most=None if verbose or sites == "all" else SHORT)
    whole = (
        ("tolerance", [diff.tolerance]),
        ("not compared", _not_compared(diff)),
        ("rows", _rows(diff.coverage, roles)),
        ("benign", [f"{note.name}: {note.text}" for note in diff.benign]),
        ("accept length", _accept_length(diff.accept_length)),
    )
    short = (
        ("traces", _traces(diff)),
        ("notes", [f"{note.name}: {note.text}" for note in diff.notes if verbose or note.name not in _QUIET]),
        ("behind it", _behind(diff) if verbose else []),
        ("gate", _gate(diff, verbose)),
        ("parts here too, independently", [f"{_where(one)}: {one.why}" for one in diff.frontier[1:]]),
        ("why", _unique([*cut, *([] if _said_already(diff) and not verbose else _why(diff))])),
    )
    if verbose:
        _sections(console, whole, roles)
        if diff.diagnosis is not None:
            print_rest(diff.diagnosis, console, whole=diff.verdict == "diverged", roles=roles)
            if diff.verdict == "agree":
                _sections(console, (("every step by itself", _by_itself(diff, diff.diagnosis)),), roles)
    _sections(console, short, roles)


def _gate(diff: Diff, verbose: bool) -> list[str]:
    """What fails a gate, in full."""
    failures = () if diff.gate is None else diff.gate.failures
    if len(failures) == 1 and not verbose:
        return []  # the ending says it
    left = 0 if verbose else max(0, len(failures) - SHORT)
    more = [f"and {left} more; --verbose lists them"] if left else []
    return [f"{one.name}: {one.text}" for one in failures[: len(failures) - left]] + more


def _said_already(diff: Diff) -> bool:
    """Whether the reason of the first divergence says what the ending says: two shapes, or that nothing compares."""
    first = diff.first_divergence
    return diff.incomparable is not None or (first is not None and first.kind == "shape")


def _sections(console: Console, sections: Iterable[tuple[str, list[str]]], roles: Roles) -> None:
    for title, lines in sections:
        if lines:
            section(console, title, map(roles.say, lines))
            console.print()


def _by_itself(diff: Diff, diagnosis: Diagnosis) -> list[str]:
    """What the replay proves beside the figures end to end, and what it cannot."""
    lines = list(replay_lines(diagnosis.replay))
    if not lines:
        lines = [f"not recomputed ({diagnosis.no_replay}): a fault within the tolerance would not be seen"]
    features = [
        one.tolerance.allowed["rho_median"]
        for one in diff.sites
        if one.site.startswith("target.hidden.") and one.tolerance is not None and one.metrics is not None
    ]
    if features:
        text = f"the target's features are held against each other alone: an error up to {max(features):.1e} passes"
        lines.append(f"{text} for rounding there")
    return lines


def _answer(diff: Diff, width: int) -> list[Text]:
    """Three lines: verdict, first divergence with both sides, coverage."""
    first = diff.first_divergence
    lines = [Text(diff.verdict, style=STYLE[diff.verdict])]
    if diff.incomparable is not None:
        lines[0].append(": the two traces could not be compared", style="default")
        lines.append(Text(diff.incomparable))
    elif first is not None and first.kind in ("parameters", "step"):
        lines.append(_proven(first, lines[0]))
    elif first is not None:
        names = "train and serve" if diff.roles.usual else f"{diff.roles.reference} and {diff.roles.other}"
        long = f": {names} first part at {_where(first)} ({first.kind})"
        fits = len(diff.verdict) + len(long) <= width
        lines[0].append(long if fits else f": they part at {_where(first)} ({first.kind})", style="default")
        one, two = ("train", "serve") if diff.roles.usual else (diff.roles.reference, diff.roles.other)
        lines.append(Text(f"{one} {_facts(first.train)} | {two} {_facts(first.serve)}"))
    else:
        compared = [result for result in diff.sites if result.verdict == "agree"]
        lines[0].append(f": {len(compared)} sites and steps are equal within tolerance", style="default")
        lines.append(Text(_largest(compared)))
    coverage = diff.coverage
    comparable = coverage.matched + coverage.unmatched_serve
    skipped = sum(coverage.skipped_serve.values())
    text = f"coverage: {coverage.matched} of {comparable} serve rows have a train row ({coverage.per_cent})"
    lines.append(Text(text + (f", {skipped} skipped" if skipped else "")))
    return lines


def _proven(first: Divergence, line: Text) -> Text:
    """What is proved of one site alone: completes the first line, and gives the second."""
    if first.kind == "step":
        line.append(f": {_where(first)} is not computed as trained", style="default")
        return Text(f"within rounding end to end, but by itself: {_facts(first.serve)}")
    line.append(f": the weights served at {first.site} are not the trained ones", style="default")
    name = str(first.serve["text"]).partition(" ")[0]
    return Text(f"{name}: norm {first.serve['norm']:.6g}, trained {first.train['norm']:.6g}")


def _where(one: Divergence) -> str:
    return f"{one.site}, step {one.step}"


def _largest(results: Iterable[SiteResult]) -> str:
    measured = [(r.metrics.rho_max, r) for r in results if isinstance(r.metrics, Metrics) and r.tolerance]
    if not measured:
        return "shapes, tokens and positions are equal; no values were compared"
    worst, at = max(measured, key=lambda item: item[0])
    allowed = at.tolerance.allowed["rho_max"] if at.tolerance else 0.0
    return f"largest error: {worst:.2g} at {at.site}, step {at.step} ({allowed:.2g} allowed)"


def _facts(facts: Mapping[str, Any]) -> str:
    if facts.get("text"):
        return str(facts["text"])
    parts = []
    if facts.get("shape"):
        parts.append(f"[{', '.join(str(size) for size in facts['shape'])}] {facts.get('dtype') or ''}".rstrip())
    parts += [f"{name} {facts[name]:.5g}" for name in ("norm",) if name in facts]
    if facts.get("nonfinite"):
        parts.append(f"{facts['nonfinite']} not finite")
    names = ("token", "position", "draft_id", "target_id")
    parts += [f"{name} {'-' if facts[name] is None else facts[name]}" for name in names if name in facts]
    return ", ".join(parts) or "-"


def _why(diff: Diff) -> list[str]:
    if diff.incomparable is not None:
        return [diff.incomparable]
    first = diff.first_divergence
    if first is None:
        return []
    lines = [first.why]
    if first.row is not None:
        row = first.row
        path = f", path {list(row.path)}" if row.path else ""
        lines.append(f"worst row: prompt {row.prompt_key!r} (train {row.prompt_id}), root {row.root}{path}")
    if "element" in first.train:
        a, b = first.train["element_value"], first.serve["element_value"]
        lines.append(f"worst element of it: [{first.train['element']}] {a:.6g} in training, {b:.6g} in serving")
    return lines


def _behind(diff: Diff) -> list[str]:
    behind = [result for result in diff.sites if result.verdict == "diverged" and not result.frontier]
    return [f"{len(behind)} sites and steps that are computed from it differ too"] if behind else []


def _not_compared(diff: Diff) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for result in diff.sites:
        if result.verdict == "not compared" and result.reason is not None:
            names = by_reason.setdefault(result.reason, [])
            names.append(f"{result.site} (step {result.step})")
    return [
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {reason}"
        for reason, names in by_reason.items()
    ]


def _traces(diff: Diff) -> list[str]:
    """Which trace is which, where that does not go without saying."""
    if diff.roles.usual:
        return []
    return [
        f"{name} is {facts['path']} ({facts['host']} {(facts['packages'] or {}).get(facts['host'], '')}, "
        f"{facts['dtype']}, {facts['created']})"
        for name, facts in zip((diff.roles.reference, diff.roles.other), diff.traces.values(), strict=True)
    ]


def _said(roles: Roles, line: Text) -> Text:
    """`line` said of these two traces."""
    if not roles.usual:
        spoken = Text()
        for part in line.split("\n") if "\n" in line.plain else [line]:
            spoken.append(roles.say(part.plain), style=part.style)
        return spoken
    return line


def _rows(coverage: Coverage, roles: Roles) -> list[str]:
    lines = [
        f"train {coverage.train_rows}, serve {coverage.serve_rows}, matched {coverage.matched}, "
        f"unmatched {coverage.unmatched_train} and {coverage.unmatched_serve}"
    ]
    for side, skipped in (("train", coverage.skipped_train), ("serve", coverage.skipped_serve)):
        lines += [f"{count} {side} rows skipped: {skipped_because(reason, roles)}" for reason, count in skipped.items()]
    return lines


def _accept_length(accept: AcceptLength) -> list[str]:
    if accept.observed is None:
        return ["not known: the serve trace holds no verify rounds"]
    if accept.reference is not None:
        return [
            f"{accept.observed:.2f} tokens per round in serving, {accept.reference:.2f} in training, bonus token "
            "included"
        ]
    depths = ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(accept.by_depth, start=1))
    lines = [f"{accept.observed:.2f} tokens per round, bonus token included ({accept.rounds} rounds)"]
    lines += [f"accepted by depth {depths}"] if depths else []
    if accept.predicted is None:
        return lines
    depths = ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(accept.predicted_by_depth, start=1))
    where = "from round to round" if accept.predicted_basis == "walk" else "at the roots of the server's rounds"
    what = "predicted by the training forward on these tokens"
    if accept.predicted_range is not None:
        what += f" for such trees ({accept.predicted_range[0]:.2f} at least, {accept.predicted_range[1]:.2f} at most)"
    if not accept.comparable:
        what = "is what the training forward gets with a chain on these tokens, and no forecast of the tree of "
        what += f"{accept.branches} branches that the server drafted"
    lines.append(f"{accept.predicted:.2f} {what} ({accept.predicted_rounds} rounds, {where}); by depth {depths}")
    if accept.undecided:
        lines.append(
            f"{accept.undecided} of these are not known at every depth: record the training side again with --replay"
        )
    if accept.comparable and (accept.better or accept.worse):
        lines.append(
            f"training would have had more accepted in {accept.better} of the server's rounds, fewer in {accept.worse}"
        )
    return lines


def _fit(line: Text, width: int) -> Text:
    """`line` in `width` columns, with dots where it was cut (`print_diff` says the whole of it again below)."""
    if line.cell_len > width:
        line = line.copy()
        line.truncate(width - 4)
        line.append(" ...")
    return line


def _printable(line: Text) -> Text:
    """`line` with what has no glyph shown as an escape, before it is cut to the width of the screen."""
    shown = line.copy()
    shown.plain = printable(line.plain)
    return shown


def _unique(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))
