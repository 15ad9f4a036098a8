"""What a cause is, and the one way most of them are proved: a counterfactual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Measured, Replay, Replayed

Verdict = Literal["confirmed", "ruled_out", "not_tested"]


@dataclass(frozen=True)
class Outcome:
    """What one check says.

    Attributes:
        verdict: confirmed only on decisive evidence.
        evidence: in numbers.
        fix: what to do (confirmed), or what would test it (not tested).
        site: where it shows (confirmed).
        changed: the replay that has the fault as this cause says it; None for a cause proved otherwise.
        deployed: the fault is what the deployed folder says, and not a guess that fits.
        words: `changed` in words.
        together: `changed` holds on top of what else the deployed folder says, and neither does it alone.
        explains: sites whose steps it explains by more than `changed` (a fact about a parameter); None for those of the
            table of causes, if there is no `changed` to ask.
    """

    verdict: Verdict
    evidence: str
    fix: str | None = None
    site: str | None = None
    changed: Replay | None = None
    deployed: bool = False
    words: str = ""
    together: bool = False
    explains: frozenset[str] | None = None


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
        last: looks when the others have (`Context.outcomes`), since what they explain is none of its business.
        of_training: is about how the draft was trained, so that without a train trace there is nothing to look at.
        of_server: is about what only a server does (rounds, caches, requests), so that it needs a serve trace.
        families: the families of drafts it is about, by name; none named for all.
    """

    name: str
    looks: str
    proof: str
    cure: str
    sites: tuple[str, ...]
    check: Callable[[Context], Outcome]
    last: bool = False
    of_training: bool = False
    of_server: bool = False
    families: tuple[str, ...] = ()

    def untestable(self, context: Context) -> Outcome | None:
        """Why the cause is not looked at: in a pair of two servers or of two trainers, or of another family's draft;
        None if it is.
        """
        family = context.serve.family.name
        if self.families and family not in self.families:
            return ruled_out(f"does not apply to a draft of the family {family}")
        if self.of_training and not context.has_training:
            return not_tested(NO_TRAINING, "hold the server against a train trace (record --mode train --replay)")
        if self.of_server and not context.has_server:
            return not_tested("no serve trace", "hold a serve trace against the reference")
        return None


def without_parameters(context: Context) -> Outcome | None:
    """Why parameters as loaded cannot be compared; None if both traces hold them."""
    trained, served = context.params
    if trained and served:
        return None
    side = "train" if not trained else "serve"
    return not_tested(f"the {side} trace holds no parameters", f"record the {side} side with this version")


NO_TRAINING = "no training trace"
RECORD_VALUES = (
    "record both sides with --level values and give the checkpoints (--train-draft, --serve-draft, --target)"
)

#: why nothing is said of fc and of what enters it, and what to do first
ONE_LAYER_FED = ("the server fed one layer only", "mend single-layer-features first and record again")


class Hypothesis(NamedTuple):
    """A changed replay.

    Attributes:
        words: what was changed.
        replay: with the change; None for a change that cannot be made here.
        deployed: the change is what the deployed folder says, and not a guess.
    """

    words: str
    replay: Replay | None
    deployed: bool = False


#: hypotheses on a faulty step of a replay; words and a replay alone will do
Hypotheses = Callable[[Replay, Replayed], Iterable[Hypothesis | tuple[str, Replay | None]]]


def counterfactual(
    context: Context,
    sites: Sequence[str],
    hypotheses: Hypotheses,
    fix: Callable[[str], str],
    own: tuple[str, ...] = (),
) -> Outcome:
    """Confirm the first hypothesis that brings every faulty step of a site down to rounding.

    Two faults may meet in one step. So what does not do it alone is tried once more on top of everything else that the
    deployed folder says otherwise than the training (`Context.company`), unless that explains the step by itself.

    Args:
        context: the pair.
        sites: sites the cause would show at, in forward order.
        hypotheses: changed replays to try on a faulty step of a site.
        fix: the fix, from the words of the hypothesis that holds.
        own: what of the form is this cause's own (names of `Context.company`).
    """
    if context.replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    nodes = context.nodes(sites)
    judged = [one for one in nodes if one.serve is not None]
    faulty = [one for one in judged if one.verdict == "faulty" and not context.agrees(one.site, one.step)]
    if not faulty:
        if not judged:
            if context.skips_fc and all(site.startswith("fc.") for site in sites):
                return not_tested(*ONE_LAYER_FED)
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
        for tried, besides in _tries(context, mine, hypotheses, own):
            worst = _worst(tried, mine)
            if worst is None:
                continue
            if worst.reproduced:
                words = f"{tried.words}{besides}"
                evidence = (
                    f"{site}, step {mine[0].step}: as trained {_figures(mine[0])}; with {words} {worst.against()}"
                )
                return Outcome(
                    "confirmed",
                    evidence,
                    fix(tried.words),
                    site,
                    tried.replay,
                    tried.deployed,
                    tried.words,
                    together=bool(besides),
                )
            if best is None or worst.ratio < best[1].ratio:
                best = tried.words, worst
        said.append(f"{site} is not as trained ({_figures(mine[0])})" + (
            f", and no better explained by {best[0]} ({best[1].words()})" if best else ""
        ))  # fmt: skip
    return ruled_out("; ".join(said[:2]))


def _tries(
    context: Context, nodes: Sequence[Replayed], hypotheses: Hypotheses, own: tuple[str, ...]
) -> Iterator[tuple[Hypothesis, str]]:
    """Hypotheses on the trained form, then on the deployed one; and what they are tried on, in words."""
    assert context.replay is not None
    yield from ((Hypothesis(*one), "") for one in hypotheses(context.replay, nodes[0]))
    company = context.company(*own)
    if company is not None:
        alone = _worst(Hypothesis(company.words, company.replay), nodes)
        if alone is None or not alone.reproduced:
            yield from (
                (Hypothesis(*one), f", besides {company.words}") for one in hypotheses(company.replay, nodes[0])
            )


def _worst(tried: Hypothesis, nodes: Sequence[Replayed]) -> Measured | None:
    """The figures of the step that a hypothesis reproduces worst; None if one cannot be recomputed under it."""
    if tried.replay is None:
        return None
    found = [tried.replay.measure(one.site, one.step, one.train) for one in nodes]
    measured = [one for one in found if isinstance(one, Measured)]
    return max(measured, key=lambda one: one.ratio) if len(measured) == len(nodes) else None


def innocent(judged: Sequence[Replayed]) -> str:
    """The step that comes closest to what is allowed, in words."""
    measured = [(one.serve.ratio, one.serve, one) for one in judged if one.serve is not None]
    _, serve, worst = max(measured, key=lambda item: item[0])
    names = list(dict.fromkeys(one.site for one in judged))
    which = names[0] if len(names) == 1 else f"{len(names)} sites, worst {worst.site}"
    return f"{which}, recomputed from the server's own inputs as trained: {serve.against()}"


def _figures(one: Replayed) -> str:
    return one.serve.words() if one.serve is not None else "not recomputed"


def as_trained(context: Context, check: str, names: tuple[str, ...], what: str, otherwise: str) -> str:
    """The fix of what the server computes otherwise than trained: of its config, unless that says it as trained.

    Args:
        context: the pair.
        check: the static check that speaks of it; what that advises comes first.
        names: the fields (of `Form`).
        what: the fields and their values as trained, in words.
        otherwise: the fix of the config.
    """
    trained, served = context.form, context.served_form
    known = context.failed(check) is None and trained is not None and served is not None
    if known and all(getattr(served, name) == getattr(trained, name) for name in names):
        return f"the deployed config says {what} as trained, and the server computes otherwise: update or report it"
    return context.fix(check, otherwise)


def clipped(names: Iterable[str], most: int = 4) -> str:
    """Names, the first few."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
