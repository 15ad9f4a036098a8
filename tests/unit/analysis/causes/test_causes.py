"""Each cause is confirmed on its fault, alone, and none on a healthy pair (the demo's models, run in numpy).

Every pair is also compared by its sketches alone: they part where the values do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace_analysis import causes
from eagle_trace_analysis.causes import REGISTRY
from eagle_trace_analysis.diagnosis.diagnose import diagnose
from tests.support import planted_faults as plant
from tests.support.planted import Planted, run
from tests.support.relevel import expect_the_same_at_sketch

pytestmark = pytest.mark.slow

CASES = plant.faults()

IDS = {
    "single-layer-features",
    "layer-ids-shifted",
    "layer-ids-default",
    "layer-ids-ignored",
    "chunk-end-token",
    "kv-rows-missing",
    "kv-length",
    "verify-rejects",
    "features-permuted",
    "features-degenerate",
    "features-normed",
    "features-without-residual",
    "target-differs",
    "tokens-differ",
    "input-shift",
    "tokens-fed-wrongly",
    "positions-wrong",
    "carry-of-another-row",
    "kv-slot-of-another-step",
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
    "head-norm",
    "norm-eps",
    "norm-offset",
    "rope-theta",
    "rope-layout",
    "qkv-order",
    "rope-tables",
    "max-position",
    "softmax-scale",
    "sliding-window",
    "kv-not-refreshed",
    "kv-cached-prefix",
    "kv-cache-dtype",
    "router-tipped",
    "tp-shard",
    "nonfinite",
    "batch-variance",
    "position-offset",
    "metric",
}


def test_every_cause_is_registered() -> None:
    assert set(REGISTRY) == IDS


def test_a_cause_stands_in_the_file_of_its_name_or_of_the_words_that_its_family_begins_with() -> None:
    held: dict[str, list[str]] = {}
    for name, cause in REGISTRY.items():
        held.setdefault(cause.check.__module__.rsplit(".", 1)[1], []).append(name.replace("-", "_"))
    assert {file: names for file, names in held.items() if names != [file] and len(names) == 1} == {}
    assert [file for file, names in held.items() if not all(f"{name}_".startswith(f"{file}_") for name in names)] == []
    files = {path.stem for path in Path(causes.__file__).parent.glob("*.py")}
    assert files - held.keys() == {"__init__", "base", "document"}


def test_every_cause_that_can_be_confirmed_has_a_fault_here() -> None:
    assert {case.cause for case in CASES} | {
        "target-differs",
        "batch-variance",
        "position-offset",
        "router-tipped",
        "weights-differ",
    } == IDS


def expect(case: Planted, folder: Path, dtype: str = "float32") -> None:
    result, train, serve = run(case, folder, dtype)
    expect_the_same_at_sketch(result, train, serve, folder, reference="values" if case.cause else "sketch")
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


def test_a_target_changed_in_late_layers_is_confirmed_at_the_first_feature_that_differs(tmp_path: Path) -> None:
    """As a LoRA on queries and values does: 4 of some 70 tensors, and the first features are equal."""
    expect(plant.target_with_noise(tmp_path, 4, ("q_proj", "v_proj")), tmp_path)


def test_another_target_under_the_same_path_is_told_by_what_the_recorders_sampled(tmp_path: Path) -> None:
    result, train, serve = run(plant.target_with_noise(tmp_path), tmp_path)
    serve.manifest.target["path"] = train.manifest.target["path"]
    (cause,) = diagnose(result, train, serve).confirmed
    assert cause.cause == "target-differs"
    assert "tensors sampled differ" in cause.evidence


def test_features_that_differ_for_no_known_cause_leave_the_target_open(tmp_path: Path) -> None:
    """The samples of both targets are equal, which proves nothing."""
    result, train, serve = run(plant.target_with_noise(tmp_path), tmp_path)
    serve.manifest.target |= {name: train.manifest.target[name] for name in ("path", "tensors")}
    diagnosis = diagnose(result, train, serve)
    assert not diagnosis.confirmed
    (target,) = (one for one in diagnosis.causes if one.cause == "target-differs")
    assert target.verdict == "not_tested"
    assert target.evidence.startswith("target.hidden.0 differs, which no other cause is proved to explain")
    assert diagnosis.unexplained


def test_a_fault_behind_the_first_is_found_too(tmp_path: Path) -> None:
    result, _, _ = run(plant.two_faults(), tmp_path)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["single-layer-features", "norm-eps"]
