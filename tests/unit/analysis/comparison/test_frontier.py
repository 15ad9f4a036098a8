"""Whatever diverged, something is the first; nothing explains itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_trace.sites import draft_sites
from eagle_trace_analysis.comparison.frontier import find_frontier
from eagle_trace_analysis.comparison.result import Divergence, SiteResult

SITES = draft_sites()
NODES = [(site.name, step) for site in SITES for step in range(3) if step == 0 or site.steps == "all"]


def results(*nodes: tuple[str, int], kind: Any = "values") -> dict[tuple[str, int], SiteResult]:
    return {
        (site, step): SiteResult(site, step, divergence=Divergence(site, step, kind, "", {}, {}))
        for site, step in nodes
    }


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NODES), st.sampled_from(["shape", "presence", "values", "nonfinite"]), min_size=1)
)
def test_some_divergence_is_always_the_first(kinds: dict[tuple[str, int], str]) -> None:
    found: dict[tuple[str, int], SiteResult] = {}
    for node, kind in kinds.items():
        found |= results(node, kind=kind)
    frontier = find_frontier(SITES, found)
    assert frontier
    assert frontier <= set(found)


def test_a_width_that_is_carried_round_does_not_explain_itself() -> None:
    stream = (
        "hidden",
        "layer.0.attn.residual",
        "layer.0.mlp.norm",
        "layer.0.mlp.gate",
        "layer.0.out",
        "carry",
    )
    found = results(*((site, 0) for site in stream), kind="shape")
    assert ("hidden", 0) in find_frontier(SITES, found)
    assert ("carry", 0) not in find_frontier(SITES, found)


def test_a_number_does_not_explain_a_shape_but_a_shape_explains_numbers() -> None:
    found = results(("token", 0), ("hidden", 0)) | results(("fused", 0), kind="shape")
    assert find_frontier(SITES, found) == {("token", 0), ("fused", 0)}


def test_the_slices_of_fused_are_explained_by_it_and_not_the_other_way_round() -> None:
    found = results(("target.hidden.0", 0), ("target.hidden.1", 0), kind="presence") | results(
        ("fused", 0), kind="shape"
    )
    assert find_frontier(SITES, found) == {("fused", 0)}
    # in numbers the slices come first
    found = results(("target.hidden.0", 0), ("fused", 0))
    assert find_frontier(SITES, found) == {("target.hidden.0", 0)}


@pytest.mark.parametrize("step", [1, 2])
def test_the_cache_of_any_step_before_explains_attention(step: int) -> None:
    found = results(("layer.0.attn.k_rope", 0), ("layer.0.attn.context", step))
    assert find_frontier(SITES, found) == {("layer.0.attn.k_rope", 0)}


def test_d2t_is_explained_by_nothing() -> None:
    found = results(("logits", 0)) | results(("topk.draft_id", 0), ("topk.target_id", 0), kind="ids")
    assert find_frontier(SITES, found) == {("logits", 0), ("topk.target_id", 0)}


def test_a_site_that_was_not_compared_is_looked_through() -> None:
    found = results(("layer.0.mlp.norm", 0), ("layer.0.mlp.out", 0))
    for site in ("layer.0.mlp.gate", "layer.0.mlp.up", "layer.0.mlp.act"):
        found[site, 0] = SiteResult(site, 0, reason="fused kernel")
    assert find_frontier(SITES, found) == {("layer.0.mlp.norm", 0)}
