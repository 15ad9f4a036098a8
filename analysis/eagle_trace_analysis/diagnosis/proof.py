"""Divergences that are proved of one step alone, while the two sides stay within tolerance there end to end.

What is allowed between the two sides grows with the roundings on the way to a site; what a step does with its own
recorded inputs knows no way. So a step that the isolated replay finds faulty, with the training side reproduced by the
same recomputation, is a divergence whatever the figures end to end, and is named as the site's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from eagle_trace.sites import sites_of
from eagle_trace_analysis.comparison.checks import check_parameters
from eagle_trace_analysis.comparison.frontier import find_frontier, shape_order
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import Diff, Divergence, SiteResult
from eagle_trace_analysis.replay.replay import Replayed


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
    return _with(diff, {node: replace(results[node], divergence=divergence) for node, divergence in proven.items()})


def with_parameters(diff: Diff, apart: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Diff:
    """`diff` with a divergence of kind ``parameters`` where other weights were loaded than trained.

    The comparison itself knows of those that digests or norms tell apart; where the checkpoints are at hand, more are.

    Args:
        diff: the comparison.
        apart: parameters that differ (`eagle_trace_analysis.comparison.checks.check_parameters`).
    """
    return _with(diff, check_parameters(apart, {(one.site, one.step): one for one in diff.sites}))


def _with(diff: Diff, found: Mapping[tuple[str, int], SiteResult]) -> Diff:
    """`diff` with other results at some sites and steps."""
    if not found:
        return diff
    results = {(one.site, one.step): one for one in diff.sites} | dict(found)
    sites = shape_order(sites_of(sorted({site for site, _ in results})))
    order = {site.name: at for at, site in enumerate(sites)}
    frontier = find_frontier(sites, results)
    nodes = sorted(results, key=lambda node: (node[1], order[node[0]]))
    ordered = tuple(replace(results[node], frontier=node in frontier) for node in nodes)
    return replace(diff, sites=ordered, incomparable=None)


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
