"""Each cause is confirmed on its fault, alone, and none on a healthy pair (the demo's models, run in numpy).

Every pair is also compared by its sketches alone: they part where the values do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace_analysis.causes import REGISTRY
from tests.support import planted_faults as plant
from tests.support.planted import Planted, run
from tests.support.relevel import expect_the_same_at_sketch

CASES = plant.faults()

IDS = {
    "single-layer-features",
    "layer-ids-shifted",
    "layer-ids-default",
    "features-permuted",
    "features-degenerate",
    "features-normed",
    "target-differs",
    "tokens-differ",
    "input-shift",
    "weights-dropped",
    "weights-missing",
    "weights-differ",
    "lm-head-tied",
    "lm-head-from-target",
    "embedding-replaced",
    "d2t-absolute",
    "d2t-missing",
    "d2t-stale",
    "residual-norm",
    "fc-norm-ignored",
    "carry-norm",
    "norm-eps",
    "norm-offset",
    "rope-theta",
    "rope-layout",
    "qkv-order",
    "max-position",
    "sliding-window",
    "kv-not-refreshed",
    "kv-cached-prefix",
    "tp-shard",
    "nonfinite",
    "batch-variance",
    "position-offset",
    "metric",
}


def test_every_cause_is_registered() -> None:
    assert set(REGISTRY) == IDS


def test_every_cause_that_can_be_confirmed_has_a_fault_here() -> None:
    assert {case.cause for case in CASES} | {"target-differs", "batch-variance", "position-offset", "weights-differ"} == IDS


def expect(case: Planted, folder: Path, dtype: str = "float32") -> None:
    result, train, serve = run(case, folder, dtype)
    expect_the_same_at_sketch(result, train, serve, folder)
    diagnosis = result.diagnosis
    assert diagnosis is not None
    found = {one.cause: one.evidence for one in diagnosis.confirmed}
    assert list(found) == ([case.cause] if case.cause else []), "\n".join(
        f"{one.verdict} {one.cause}: {one.evidence}" for one in diagnosis.causes
    )
    assert all(one.fix for one in diagnosis.confirmed)
    first = result.first_divergence
    assert (first.site if first else None) == case.site
    assert not diagnosis.unexplained
    assert all(one.evidence for one in diagnosis.causes)


@pytest.mark.parametrize("case", plant.HEALTHY, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_confirmed_on_a_healthy_pair(case: Planted, dtype: str, tmp_path: Path) -> None:
    expect(case, tmp_path, dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_of_a_fault_is_confirmed_and_no_other(case: Planted, tmp_path: Path) -> None:
    expect(case, tmp_path)


def test_another_target_is_confirmed_and_no_other_cause(tmp_path: Path) -> None:
    expect(plant.target_with_noise(tmp_path), tmp_path)


def test_a_fault_behind_the_first_is_found_too(tmp_path: Path) -> None:
    result, _, _ = run(plant.two_faults(), tmp_path)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["single-layer-features", "norm-eps"]
