"""What of a comparison follows from weights that training has moved since, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace_analysis import Diff, Divergence, diff
from eagle_trace_analysis.comparison.moved import beside_moved, moved_weights

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
#: of the first site behind the features, and in neither trace, so that it is not known to be the same
MOVED = "fc.bias"


@pytest.fixture(scope="module")
def traces() -> tuple[Trace, Trace]:
    return open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "healthy.trace")


@pytest.fixture(scope="module")
def healthy(traces: tuple[Trace, Trace]) -> Diff:
    found = diff(*traces)
    assert found.verdict == "agree"
    return found


def parted(found: Diff, site: str, kind: str) -> Diff:
    """The comparison as if a site parted at step 0."""
    divergence = Divergence(site, 0, kind, "", {}, {})  # type: ignore[arg-type]
    changed = [
        replace(one, divergence=divergence, frontier=True) if (one.site, one.step) == (site, 0) else one
        for one in found.sites
    ]
    assert changed != list(found.sites)
    return replace(found, sites=tuple(changed))


@pytest.mark.parametrize(
    ("site", "kind", "follows"),
    [
        ("fc.out", "values", True),
        ("layer.0.attn.context", "values", True),
        ("logits", "values", True),
        ("topk.draft_id", "ids", True),
        ("fused", "values", False),
        ("target.hidden.1", "values", False),
        ("embed", "values", False),
        ("layer.0.embed_norm", "values", False),
        ("token", "tokens", False),
        ("topk.target_id", "ids", False),
        ("logits", "nonfinite", False),
        ("fc.out", "shape", False),
    ],
)
def test_what_lies_behind_a_moved_weight_and_is_its_own_to_change_is_no_divergence(
    site: str, kind: str, follows: bool, healthy: Diff, traces: tuple[Trace, Trace]
) -> None:
    found = parted(healthy, site, kind)
    assert found.first_divergence is not None
    first = beside_moved(found, *traces, [MOVED]).first_divergence
    assert (first is None) == follows
    assert first is None or (first.site, first.kind) == (site, kind)


def test_nothing_is_excused_where_no_weight_has_moved(healthy: Diff, traces: tuple[Trace, Trace]) -> None:
    names = [str(name) for name in traces[0].table("params").column("canonical_name").to_pylist()]
    held = [name for name in names if name != "t2d"]  # no server loads it, and no training trains it
    assert moved_weights(*traces, held) == set()
    found = parted(healthy, "logits", "values")
    assert beside_moved(found, *traces, held) is found
