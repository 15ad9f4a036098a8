"""Diagnosis: every cause with its verdict, its evidence and its fix, and every step recomputed by itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from eagle_trace.errors import EagleTraceError
from eagle_trace.reader import Trace
from eagle_trace.sites import forward_place
from eagle_trace_analysis.causes import REGISTRY
from eagle_trace_analysis.causes.base import RECORD_VALUES, Verdict, not_tested
from eagle_trace_analysis.comparison.metrics import ANY_NUMBERS
from eagle_trace_analysis.comparison.params import comparable
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.diagnosis.proof import with_parameters, with_proven
from eagle_trace_analysis.diagnosis.settle import settle, unexplained
from eagle_trace_analysis.evidence.context import Checkpoints, Context
from eagle_trace_analysis.replay.replay import Replayed
from eagle_trace_analysis.shown import html_of

__all__ = ["CauseVerdict", "Checkpoints", "Diagnosis", "diagnose", "diagnosed"]


@dataclass(frozen=True)
class CauseVerdict:
    """One cause, looked at.

    Attributes:
        cause: its name.
        verdict: ``confirmed``, ``ruled_out`` or ``not_tested``.
        evidence: in numbers; for `not_tested` what was lacking.
        fix: what to do (confirmed), or what would test it (not tested); None for `ruled_out`.
        site: where it shows (confirmed).
    """

    cause: str
    verdict: Verdict
    evidence: str
    fix: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Every cause with its verdict.

    Attributes:
        causes: the confirmed in the order of the forward, then the ruled out, then the not tested.
        replay: every step of the serve side recomputed from its own inputs.
        unexplained: steps that are faulty, or divergences, that no confirmed cause speaks about.
        no_replay: why no step was recomputed; None if steps were.
    """

    causes: tuple[CauseVerdict, ...] = ()
    replay: tuple[Replayed, ...] = ()
    unexplained: tuple[str, ...] = field(default=())
    no_replay: str | None = None

    def of(self, verdict: Verdict) -> tuple[CauseVerdict, ...]:
        """The causes with one verdict."""
        return tuple(one for one in self.causes if one.verdict == verdict)

    @property
    def confirmed(self) -> tuple[CauseVerdict, ...]:
        """What is proved, first in the forward first."""
        return self.of("confirmed")

    @property
    def faulty(self) -> tuple[Replayed, ...]:
        """Steps that the server computes otherwise than trained, whatever lies before them."""
        return tuple(one for one in self.replay if one.verdict == "faulty")

    def _repr_html_(self) -> str | None:
        return html_of(self)


_ORDER: dict[Verdict, int] = {"confirmed": 0, "ruled_out": 1, "not_tested": 2}


@ANY_NUMBERS
def diagnose(diff: Diff, train: Trace, serve: Trace, checkpoints: Checkpoints | None = None) -> Diagnosis:
    """Look at every cause.

    Args:
        diff: comparison of the two traces.
        train, serve: the traces.
        checkpoints: folders that override those of the manifests.
    """
    return diff.roles.said(_diagnose(Context(diff, train, serve, checkpoints)))


def _diagnose(context: Context) -> Diagnosis:
    # what is proved of weights and steps counts as divergences before any cause looks
    apart = [(one.name, one.trained, one.served) for one in context.apart if comparable(one.trained, one.served)]
    context.take(with_parameters(context.diff, apart))
    replayed = _replay(context)
    context.take(with_proven(context.diff, replayed))
    look_at_all(context)
    settled = settle(context, replayed)
    verdicts = [CauseVerdict(name, one.verdict, one.evidence, one.fix, one.site) for name, one in settled.items()]
    order = {name: at for at, name in enumerate(REGISTRY)}
    verdicts.sort(key=lambda one: (_ORDER[one.verdict], _place(one.site), order[one.cause]))
    left = unexplained(context, settled, replayed)
    return Diagnosis(tuple(verdicts), replayed, left, None if context.replay is not None else context.no_replay)


@ANY_NUMBERS
def diagnosed(diff: Diff, train: Trace, serve: Trace, checkpoints: Checkpoints | None = None) -> Diff:
    """`diff` with its diagnosis, and with the steps that are proved faulty by themselves as divergences.

    A comparison that could not be made has no diagnosis.
    """
    if not diff.sites:
        return diff
    context = Context(diff, train, serve, checkpoints)
    diagnosis = _diagnose(context)
    return diff.roles.said(replace(context.diff, diagnosis=diagnosis))


def look_at_all(context: Context) -> None:
    """Let every cause look: `context.outcomes`."""
    for last in (False, True):
        for name, cause in REGISTRY.items():
            if cause.last == last:
                try:
                    context.outcomes[name] = cause.untestable(context) or cause.check(context)
                except EagleTraceError as error:
                    context.outcomes[name] = not_tested(str(error), RECORD_VALUES)


def _replay(context: Context) -> tuple[Replayed, ...]:
    if context.replay is None:
        return ()
    names = [site for site in context.replay.sites if context.replay.has_step(site)]
    names += [site for site in ("fc.in", "fc.out") if site in context.train.sites and site not in names]
    nodes = [one for one in context.nodes(names) if not (one.step and one.site.startswith("fc."))]
    return tuple(sorted(nodes, key=lambda one: (one.step, _place(one.site))))


def _place(site: str | None) -> int:
    # one layer's features are seen in `fused`, before any of its slices
    return -1 if site == "fused" else forward_place(site or "")
