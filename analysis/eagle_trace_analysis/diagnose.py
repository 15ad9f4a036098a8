"""Diagnosis: every cause with its verdict, its evidence and its fix, and every step recomputed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from eagle_trace.errors import EagleTraceError
from eagle_trace.reader import Trace
from eagle_trace.sites import draft_sites
from eagle_trace_analysis.causes import REGISTRY
from eagle_trace_analysis.causes.base import RECORD_VALUES, Verdict, not_tested
from eagle_trace_analysis.causes.parameters import not_loaded, site_of
from eagle_trace_analysis.context import Checkpoints, Context
from eagle_trace_analysis.params import same
from eagle_trace_analysis.proof import with_proven
from eagle_trace_analysis.replay import Replayed
from eagle_trace_analysis.result import Diff
from eagle_trace_analysis.steps import STEPS

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
    """

    causes: tuple[CauseVerdict, ...] = ()
    replay: tuple[Replayed, ...] = ()
    unexplained: tuple[str, ...] = field(default=())

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

    def _repr_html_(self) -> str:
        from eagle_trace_analysis.report.notebook import diagnosis_html

        return diagnosis_html(self)


_ORDER: dict[Verdict, int] = {"confirmed": 0, "ruled_out": 1, "not_tested": 2}


def diagnose(diff: Diff, train: Trace, serve: Trace, checkpoints: Checkpoints | None = None) -> Diagnosis:
    """Look at every cause.

    Args:
        diff: comparison of the two traces.
        train, serve: the traces.
        checkpoints: folders that override those of the manifests.
    """
    return _diagnose(Context(diff, train, serve, checkpoints))


def _diagnose(context: Context) -> Diagnosis:
    replayed = _replay(context)
    context.take(with_proven(context.diff, replayed))
    verdicts = [_look(context, name) for name in REGISTRY]
    order = {name: at for at, name in enumerate(REGISTRY)}
    verdicts.sort(key=lambda one: (_ORDER[one.verdict], _place(one.site), order[one.cause]))
    return Diagnosis(tuple(verdicts), replayed, _unexplained(context, verdicts, replayed))


def diagnosed(diff: Diff, train: Trace, serve: Trace, checkpoints: Checkpoints | None = None) -> Diff:
    """`diff` with its diagnosis, and with the steps that are proved faulty by themselves as divergences.

    A comparison that could not be made has no diagnosis.
    """
    if not diff.sites:
        return diff
    context = Context(diff, train, serve, checkpoints)
    diagnosis = _diagnose(context)
    return replace(context.diff, diagnosis=diagnosis)


def _look(context: Context, name: str) -> CauseVerdict:
    try:
        outcome = REGISTRY[name].check(context)
    except EagleTraceError as error:
        outcome = not_tested(str(error), RECORD_VALUES)
    return CauseVerdict(name, outcome.verdict, outcome.evidence, outcome.fix, outcome.site)


def _replay(context: Context) -> tuple[Replayed, ...]:
    if context.replay is None:
        return ()
    names = [site for site in context.replay.sites if site.split(".", 2)[-1] in STEPS or site in STEPS]
    names += [site for site in ("fc.in", "fc.out") if site in context.train.sites and site not in names]
    nodes = [one for one in context.nodes(names) if not (one.step and one.site.startswith("fc."))]
    return tuple(sorted(nodes, key=lambda one: (one.step, _place(one.site))))


_SITES = {site.name: at for at, site in enumerate(draft_sites(16, 8))}


def _place(site: str | None) -> float:
    # one layer's features are seen in `fused`, before any of its slices
    return -1.0 if site == "fused" else float(_SITES.get(site or "", len(_SITES)))


def _unexplained(context: Context, verdicts: Sequence[CauseVerdict], replayed: Sequence[Replayed]) -> tuple[str, ...]:
    """Faulty steps at sites that no confirmed cause names, and a first divergence without any cause."""
    named: set[str] = set()
    for one in verdicts:
        if one.verdict == "confirmed":
            named |= {*REGISTRY[one.cause].sites, one.site or ""}
            if one.cause in ("weights-dropped", "weights-missing"):
                # the verdict names the first of them
                named |= {site_of(name) or "" for name in not_loaded(context)}
    if context.other_algorithm is not None:
        named.add("logits")
    said = []
    for site in dict.fromkeys(one.site for one in replayed if one.verdict == "faulty"):
        plain = "layer.0." + site.split(".", 2)[2] if site.startswith("layer.") else site
        if plain not in named and site not in named and not context.agrees(site):
            worst = next(one for one in replayed if one.site == site and one.verdict == "faulty")
            figures = worst.serve.words() if worst.serve else ""
            said.append(f"{site} is not computed as trained ({figures})" + _other_weights(context, site))
    first = context.diff.first_divergence
    if first is not None and not said and not any(one.verdict == "confirmed" for one in verdicts):
        said.append(f"{first.site}, step {first.step}: {first.why}")
    return tuple(said)


def _other_weights(context: Context, site: str) -> str:
    trained, served = context.params
    names = [
        name for name in trained if site_of(name) == site and name in served and not same(served[name], trained[name])
    ]
    if not names:
        return "; its weights are the trained ones" if any(site_of(name) == site for name in trained) else ""
    one = names[0]
    return (
        f"; {one} as loaded is not the trained one (norm {served[one]['norm']:.4g}, trained {trained[one]['norm']:.4g})"
    )
