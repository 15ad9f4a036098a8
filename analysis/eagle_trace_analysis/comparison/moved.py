"""A comparison beside weights that have moved: what of it is a fault, and what follows from training having gone on.

A draft in training is held against a trace of earlier weights. From the first site on that a moved weight enters,
figures differ, and have to. What no such weight enters must still agree: tokens, positions, features, the embedding
unless it is trained, d2t and whatever else stays fixed, and every shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache

from eagle_trace.reader import Trace
from eagle_trace.sites import Site, sites_of
from eagle_trace_analysis.comparison.checks import check_parameters
from eagle_trace_analysis.comparison.frontier import SELF_EXPLAINED, Node, find_frontier
from eagle_trace_analysis.comparison.params import comparable, differing, loaded, same, shown_at
from eagle_trace_analysis.comparison.result import Diff, SiteResult
from eagle_trace_analysis.comparison.tolerance import sources

#: what another weight makes differ; no weight changes a shape, a token or a position, or makes a number infinite
_OF_WEIGHTS = ("values", "ids", "parameters", "step")


def moved_weights(reference: Trace, other: Trace, trained: Collection[str]) -> set[str]:
    """Those of the trained parameters that are not known to hold the same numbers in both traces.

    Args:
        reference, other: the traces.
        trained: parameters that are trained, by their canonical names.
    """
    mine, theirs = loaded(reference), loaded(other)
    both = [name for name in mine if name in theirs and comparable(mine[name], theirs[name])]
    return set(trained) - {name for name in both if same(mine[name], theirs[name])}


def beside_moved(found: Diff, reference: Trace, other: Trace, trained: Collection[str]) -> Diff:
    """`found` without what follows from weights that training has moved; its frontier is what is left.

    A parameter that is not trained and differs is a divergence of its own, also where the figures behind it differ
    anyway.

    Args:
        found: comparison of the two.
        reference, other: the traces.
        trained: parameters that are trained, by their canonical names.
    """
    moved = moved_weights(reference, other, trained)
    if not moved or not found.sites:
        return found
    results: dict[Node, SiteResult] = {(one.site, one.step): one for one in found.sites}
    sites = sites_of([one.site for one in found.sites])
    behind = _behind(sites, moved)
    left = {node: _excused(one) if node in behind and _follows(one) else one for node, one in results.items()}
    fixed = [one for one in differing(reference, other) if one[0] not in moved]
    left |= {node: one for node, one in check_parameters(fixed, left).items() if node in left}
    frontier = find_frontier(sites, left)
    return replace(found, sites=tuple(replace(one, frontier=node in frontier) for node, one in left.items()))


def _follows(one: SiteResult) -> bool:
    return one.divergence is not None and one.divergence.kind in _OF_WEIGHTS


def _excused(one: SiteResult) -> SiteResult:
    return replace(one, divergence=None, reason="weights before it have moved: training went on")


class _Behind:
    """The nodes (site, step) that a moved weight enters, at the site or at one that it is computed from."""

    def __init__(self, sites: Mapping[str, Site], moved: Collection[str]) -> None:
        self._sites = sites
        self._entered = {shown_at(name) for name in moved}
        self._reached = cache(self._reach)

    def __contains__(self, node: Node) -> bool:
        if node[0] == SELF_EXPLAINED:  # no weight but d2t itself explains it
            return SELF_EXPLAINED in self._entered
        return self._reached(*node)

    def _reach(self, name: str, step: int) -> bool:
        return name in self._entered or any(self._reached(*source) for source in sources(self._sites, name, step))


def _behind(sites: list[Site], moved: Collection[str]) -> _Behind:
    return _Behind({site.name: site for site in sites}, moved)
