"""The frontier: divergences that no other divergence explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from eagle_trace.sites import Site
from eagle_trace_analysis.comparison.result import SiteResult
from eagle_trace_analysis.comparison.tolerance import sources

Node = tuple[str, int]

#: differs only if d2t does: judged on draft ids both sides name, so nothing upstream can explain it
SELF_EXPLAINED = "topk.target_id"
#: kinds that are proved of a site alone: nothing upstream makes a weight another one
_OWN = ("parameters", "step")


def shape_order(sites: Sequence[Site]) -> list[Site]:
    """Forward order for shapes and presence: `fused` before the ``target.hidden`` sites, which are slices of
    it.
    """
    features = [site for site in sites if site.name.startswith("target.hidden.")]
    rest = [site for site in sites if site not in features]
    at = next(index for index, site in enumerate(rest) if site.name == "fused") + 1
    return [*rest[:at], *features, *rest[at:]]


def find_frontier(sites: Sequence[Site], results: Mapping[Node, SiteResult]) -> set[Node]:
    """Nodes (site, step) that diverged while everything they are computed from did not.

    A site that was not compared is looked through: it counts as its own inputs do. A missing or wrongly
    shaped site is explained by other such sites only (no number changes a shape), and for those `fused` comes
    before its slices. What is proved of a site alone is explained by nothing but the same site at an earlier step.
    """
    by_name = {site.name: site for site in sites}
    shaped = {name for (name, _), result in results.items() if _is_shape(result)}

    @cache
    def clean(name: str, step: int) -> bool:
        if name in shaped:
            return False
        result = results.get((name, step))
        if result is not None and result.verdict != "not compared":
            return result.verdict == "agree"
        return all(clean(*source) for source in sources(by_name, name, step))

    frontier: set[Node] = set()
    for (name, step), result in results.items():
        if result.divergence is None:
            continue
        if _is_shape(result):
            explained = any(source in shaped for source in _shape_inputs(by_name[name]))
        elif result.divergence.kind in _OWN:
            # of a step that is wrong every time, the first time is enough
            explained = any(
                (before := results.get((name, earlier))) is not None and before.verdict == "diverged"
                for earlier in range(step)
            )
        else:
            explained = name != SELF_EXPLAINED and not all(clean(*source) for source in sources(by_name, name, step))
        if not explained:
            frontier.add((name, step))
    return frontier


def _is_shape(result: SiteResult) -> bool:
    return result.divergence is not None and result.divergence.kind in ("shape", "presence")


def _shape_inputs(site: Site) -> tuple[str, ...]:
    if site.name == "fused":
        return ()
    # not what is carried over steps: a width that goes round in a circle would explain itself
    return ("fused",) if site.name.startswith("target.hidden.") else site.inputs
