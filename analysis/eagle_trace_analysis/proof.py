"""Divergences that are proved of one step alone, while the two sides stay within tolerance there end to end.

What is allowed between the two sides grows with the roundings on the way to a site; what a step does with its own
recorded inputs knows no way. So a step that the isolated replay finds faulty, with the training side reproduced by the
same recomputation, is a divergence whatever the figures end to end, and is named as the site's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from eagle_trace.sites import sites_of
from eagle_trace_analysis.frontier import find_frontier
from eagle_trace_analysis.metrics import Metrics
from eagle_trace_analysis.replay import Replayed
from eagle_trace_analysis.result import Diff, Divergence, SiteResult


def with_proven(diff: Diff, replayed: Iterable[Replayed]) -> Diff:
    """`diff` with a divergence of kind ``step`` at each faulty step of the serve side that agrees end to end.

    Args:
        diff: the comparison end to end.
        replayed: verdicts of the isolated replay.
    """
    results = {(one.site, one.step): one for one in diff.sites}
    proven = {
        (one.site, one.step): divergence
        for one in replayed
        if (known := results.get((one.site, one.step))) is not None and (divergence := _proven(one, known)) is not None
    }
    if not proven:
        return diff
    results |= {node: replace(results[node], divergence=divergence, reason=None) for node, divergence in proven.items()}
    values = {one.site for one in diff.sites}
    frontier = find_frontier(sites_of(sorted(values)), results)
    sites = tuple(replace(one, frontier=node in frontier) for node, one in results.items())
    return replace(diff, sites=sites, incomparable=None)


def _proven(one: Replayed, known: SiteResult) -> Divergence | None:
    """A divergence for a faulty step, None if it is not one's own or was seen end to end anyway."""
    if one.verdict != "faulty" or one.serve is None or one.train is None:
        return None
    loaded = known.divergence if known.divergence is not None and known.divergence.kind == "parameters" else None
    if known.verdict != "agree" and loaded is None:
        return None
    why = f"recomputed from the server's own inputs as trained: {one.serve.brief()}"
    if (control := one.train.systematic) is not None and one.serve.excess > 1:
        why += f" (training's own: scale {control.scale:.5f}, error {abs(control.coherent):.1e})"
    if (within := _within(known)) is not None:
        why += f"; end to end within tolerance: {within}"
    if loaded is not None:
        why += f"; {loaded.why}"
    served = {**one.serve.figures(), "text": one.serve.brief()}
    return Divergence(one.site, one.step, "step", why, one.train.figures(), served)


def _within(known: SiteResult) -> str | None:
    metrics, tolerance = known.metrics, known.tolerance
    if not isinstance(metrics, Metrics) or tolerance is None:
        return None
    allowed = tolerance.allowed["rho_median"]
    return f"median row error {metrics.rho_median:.1e}, {allowed:.1e} allowed"
