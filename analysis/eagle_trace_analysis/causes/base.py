"""What a cause is, and the one way most of them are proved: a counterfactual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle_trace_analysis.context import Context
from eagle_trace_analysis.replay import Measured, Replay, Replayed

Verdict = Literal["confirmed", "ruled_out", "not_tested"]


@dataclass(frozen=True)
class Outcome:
    """What one check says.

    Attributes:
        verdict: confirmed only on decisive evidence.
        evidence: in numbers.
        fix: what to do (confirmed), or what would test it (not tested).
        site: where it shows (confirmed).
    """

    verdict: Verdict
    evidence: str
    fix: str | None = None
    site: str | None = None


def confirmed(evidence: str, fix: str, site: str) -> Outcome:
    """Proved."""
    return Outcome("confirmed", evidence, fix, site)


def ruled_out(evidence: str) -> Outcome:
    """Looked at, and innocent."""
    return Outcome("ruled_out", evidence)


def not_tested(why: str, to_test: str) -> Outcome:
    """Could not be looked at, and what would."""
    return Outcome("not_tested", why, to_test)


@dataclass(frozen=True)
class Cause:
    """One checkable hypothesis.

    Attributes:
        name: as in the table of causes.
        looks: what people see.
        proof: how it is proved.
        cure: how it is fixed, in general (a confirmed verdict gives the fix for the case at hand).
        sites: where it shows first; ``layer.0`` stands for every layer.
        check: looks at a pair of traces.
    """

    name: str
    looks: str
    proof: str
    cure: str
    sites: tuple[str, ...]
    check: Callable[[Context], Outcome]


RECORD_VALUES = (
    "record both sides with --level values and give the checkpoints (--train-draft, --serve-draft, --target)"
)

#: a changed replay, with what was changed in words; None stands for a change that cannot be made here
Hypothesis = tuple[str, Replay | None]


def counterfactual(
    context: Context,
    sites: Sequence[str],
    hypotheses: Callable[[Replay, Replayed], Iterable[Hypothesis]],
    fix: Callable[[str], str],
) -> Outcome:
    """Confirm the first hypothesis that brings every faulty step of a site down to rounding.

    Args:
        context: the pair.
        sites: sites the cause would show at, in forward order.
        hypotheses: changed replays to try on a faulty step of a site, in words and as a replay.
        fix: the fix, from the words of the hypothesis that holds.
    """
    if context.replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    nodes = context.nodes(sites)
    judged = [one for one in nodes if one.serve is not None]
    faulty = [one for one in judged if one.verdict == "faulty" and not context.agrees(one.site, one.step)]
    if not faulty:
        if not judged:
            why = next(
                (f"{one.site}: {one.reason}" for one in nodes if one.reason),
                f"there is no {sites[0] if sites else 'such site'}",
            )
            return not_tested(why, RECORD_VALUES)
        return ruled_out(innocent(judged))
    said = []
    for site in dict.fromkeys(one.site for one in faulty):
        mine = [one for one in faulty if one.site == site]
        best: tuple[str, Measured] | None = None
        for words, changed in hypotheses(context.replay, mine[0]):
            if changed is None:
                continue
            found = [changed.measure(site, one.step, one.train) for one in mine]
            measured = [one for one in found if isinstance(one, Measured)]
            if len(measured) < len(mine):
                continue
            worst = max(measured, key=lambda one: one.ratio)
            if worst.reproduced:
                evidence = (
                    f"{site}, step {mine[0].step}: as trained {_figures(mine[0])}; with {words} {worst.against()}"
                )
                return confirmed(evidence, fix(words), site)
            if best is None or worst.ratio < best[1].ratio:
                best = words, worst
        said.append(f"{site} is not as trained ({_figures(mine[0])})" + (
            f", and no better explained by {best[0]} ({best[1].words()})" if best else ""
        ))  # fmt: skip
    return ruled_out("; ".join(said[:2]))


def innocent(judged: Sequence[Replayed]) -> str:
    """The step that comes closest to what is allowed, in words."""
    measured = [(one.serve.ratio, one.serve, one) for one in judged if one.serve is not None]
    _, serve, worst = max(measured, key=lambda item: item[0])
    names = list(dict.fromkeys(one.site for one in judged))
    which = names[0] if len(names) == 1 else f"{len(names)} sites, worst {worst.site}"
    return f"{which}, recomputed from the server's own inputs as trained: {serve.against()}"


def _figures(one: Replayed) -> str:
    return one.serve.words() if one.serve is not None else "not recomputed"


def clipped(names: Iterable[str], most: int = 4) -> str:
    """Names, the first few."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
