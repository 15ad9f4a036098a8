"""The static check: silent on healthy drafts, and one finding for each fault planted in the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.files import read_header
from eagle_trace_analysis.checkpoint.finding import CheckResult, Status
from eagle_trace_analysis.checkpoint.scan import looks_initial
from tests.support import checkpoints as make
from tests.support.check_cases import (
    Folders,
    Harm,
    both,
    drop,
    flat_config,
    named,
    only,
    put,
    rename,
    troubles,
    write_healthy,
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize("with_target", [False, True])
def test_healthy_draft_has_no_warning_in_either_format(healthy: Folders, with_target: bool) -> None:
    target = healthy.target if with_target else None
    assert troubles(check(healthy.draft, target=target)) == {}
    assert troubles(check(healthy.flat, target=target)) == {}


def test_healthy_export_with_everything_given_has_nothing_left_unchecked(healthy: Folders) -> None:
    result = check(healthy.flat, target=healthy.target, reference=healthy.draft)
    assert {f.status for f in result.findings} == {Status.PASS}
    assert result.changes == []


def test_what_cannot_be_known_is_skipped_and_not_passed(healthy: Folders) -> None:
    result = check(healthy.flat)
    skipped = {f.name for f in result.findings if f.status is Status.SKIP}
    assert {"layer-ids", "residual-norm", "norm-output", "rope", "norm-eps"} <= skipped


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer.", "model.layers.0."])
def test_names_that_the_engine_accepts_pass(healthy: Folders, tmp_path: Path, prefix: str, shards: int) -> None:
    tensors = {name.replace("layers.0.", prefix): value for name, value in make.draft_tensors().items()}
    draft = make.write_checkpoint(tmp_path, flat_config(healthy), tensors, shards)
    result = check(draft, target=healthy.target, reference=healthy.draft)
    assert troubles(result) == {}
    assert {c.change for c in result.changes} == (set() if prefix == "layers.0." else {"renamed"})


def test_fused_projections_are_accepted(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    parts = [tensors.pop(f"layers.0.self_attn.{p}_proj.weight") for p in "qkv"]
    tensors["layers.0.self_attn.qkv_proj.weight"] = np.concatenate(parts)
    assert troubles(check(make.write_checkpoint(tmp_path, flat_config(healthy), tensors))) == {}


def test_full_vocabulary_draft_needs_no_d2t(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = make.target_tensors()["lm_head.weight"]
    config = flat_config(healthy) | {"draft_vocab_size": make.VOCABULARY}
    assert troubles(check(make.write_checkpoint(tmp_path, config, tensors), target=healthy.target)) == {}


def test_the_story_d2t_is_declared_fine_in_so_many_words(healthy: Folders) -> None:
    finding = named(check(healthy.flat), "d2t")
    assert finding.status is Status.PASS
    assert finding.evidence.startswith("d2t is fine")
    assert "begins with 20 zeros" in finding.evidence
    assert "96 of 96 equal to t2d" in finding.evidence
    assert "Do not subtract arange" in finding.evidence


def nan_at_start(value: Any) -> Any:
    value = value.copy()
    value[0, :5] = np.nan
    return value


OWN = np.arange(make.DRAFT_VOCABULARY)
NO_T2D = drop("t2d")

TENSOR_FAULTS: list[tuple[str, Harm, str, str, str, Status]] = [
    ("lm_head missing", drop("lm_head.weight"), "weights-present", "weights-missing", "lm_head", Status.FAIL),
    (
        "norm missing",
        drop("layers.0.hidden_norm.weight"),
        "weights-present",
        "weights-missing",
        "hidden_norm",
        Status.FAIL,
    ),
    (
        "unknown extra",
        put("scale.weight", lambda _: np.ones(3, np.float32)),
        "weight-names",
        "weights-dropped",
        "scale.weight",
        Status.FAIL,
    ),
    ("nan", put("fc.weight", nan_at_start), "finite", "nonfinite", "(5 of 12,288)", Status.FAIL),
    (
        "zero matrix",
        put("layers.0.self_attn.o_proj.weight", np.zeros_like),
        "zeros",
        "weights-missing",
        "o_proj",
        Status.FAIL,
    ),
    (
        "constant matrix",
        put("fc.weight", np.ones_like),
        "zeros",
        "weights-missing",
        "one row throughout: fc.weight",
        Status.FAIL,
    ),
    (
        "one row",
        put("layers.0.mlp.up_proj.weight", lambda one: np.broadcast_to(one[3], one.shape).copy()),
        "zeros",
        "weights-missing",
        "one row throughout: layers.0.mlp.up_proj.weight",
        Status.FAIL,
    ),
    (
        "d2t absolute",
        put("d2t", lambda d: d + OWN),
        "d2t",
        "d2t-absolute",
        "absolute target ids",
        Status.FAIL,
    ),
    (
        "d2t absolute, no t2d",
        both(put("d2t", lambda d: d + OWN), NO_T2D),
        "d2t",
        "d2t-absolute",
        "absolute target ids",
        Status.FAIL,
    ),
    ("d2t twice", put("d2t", lambda d: d - OWN), "d2t", "d2t-absolute", "subtracted twice", Status.FAIL),
    (
        "d2t twice, no t2d",
        both(put("d2t", lambda d: d - OWN), NO_T2D),
        "d2t",
        "d2t-absolute",
        "subtracted twice",
        Status.FAIL,
    ),
    ("d2t zeros", put("d2t", np.zeros_like), "d2t", "d2t-missing", "all zeros", Status.FAIL),
    (
        "d2t zeros, no t2d",
        both(put("d2t", np.zeros_like), NO_T2D),
        "d2t",
        "d2t-missing",
        "zeros",
        Status.FAIL,
    ),
    ("d2t gone", drop("d2t"), "d2t", "d2t-missing", "no d2t", Status.FAIL),
    ("d2t short", put("d2t", lambda d: d[:-4]), "d2t", "d2t-stale", "92 entries", Status.FAIL),
    (
        "d2t stale",
        put("d2t", lambda _: make.kept_ids(5) - OWN),
        "d2t",
        "d2t-stale",
        "not those of t2d",
        Status.FAIL,
    ),
    ("d2t as float", put("d2t", lambda d: d.astype(np.float32)), "d2t", "d2t-stale", "F32", Status.FAIL),
    (
        "d2t doubled id",
        both(put("d2t", lambda d: d - (OWN == 50) * 999), NO_T2D),
        "d2t",
        "d2t-stale",
        "no reading",
        Status.FAIL,
    ),
    (
        "fc of one layer",
        put("fc.weight", lambda w: w[:, : make.HIDDEN]),
        "fc-width",
        "single-layer-features",
        "need",
        Status.FAIL,
    ),
    (
        "head rows",
        put("lm_head.weight", lambda w: w[:-6]),
        "vocabulary",
        "lm-head-from-target",
        "90 rows",
        Status.FAIL,
    ),
    (
        "query shape",
        put("layers.0.self_attn.q_proj.weight", lambda w: w[: make.HIDDEN // 2]),
        "head-shape",
        "qkv-order",
        "q_proj",
        Status.FAIL,
    ),
    (
        "zero rows",
        put(
            "layers.0.mlp.up_proj.weight",
            lambda w: w * (np.arange(make.MIDDLE) < 80)[:, None].astype(w.dtype),
        ),
        "zeros",
        "weights-missing",
        "16 of 96 rows",
        Status.WARN,
    ),
]


@pytest.mark.parametrize(
    ("harm", "name", "cause", "words", "status"),
    [f[1:] for f in TENSOR_FAULTS],
    ids=[f[0] for f in TENSOR_FAULTS],
)
@pytest.mark.parametrize("format", ["speculators", "sglang"])
def test_planted_tensor_fault_is_exactly_that_finding(
    healthy: Folders,
    tmp_path: Path,
    format: str,
    harm: Harm,
    name: str,
    cause: str,
    words: str,
    status: Status,
) -> None:
    config = make.speculators_config() if format == "speculators" else flat_config(healthy)
    tensors = make.draft_tensors()
    harm(config, tensors)
    result = check(make.write_checkpoint(tmp_path / "draft", config, tensors))
    if name == "vocabulary":  # the head's rows are d2t's business too
        assert "d2t" in troubles(result)
        result = CheckResult("", "", [f for f in result.findings if f.name != "d2t"])
    finding = only(result, name, status)
    assert finding.cause == cause
    assert words in finding.evidence


def test_renamed_layer_is_dropped_and_its_parameters_are_left_unset(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    rename("layers.0.", "decoder.")({}, tensors)
    found = troubles(check(make.write_checkpoint(tmp_path, flat_config(healthy), tensors)))
    assert set(found) == {"weight-names"}
    assert "drops 10 of 16" in found["weight-names"].evidence
    assert "-> layers.0." in found["weight-names"].fix


def test_matrix_at_its_initialisation_is_a_warning_and_a_trained_one_is_not(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    fresh = draw.normal(0, 0.02, (1024, 768))
    bound = 768**-0.5
    tensors = {
        "normal": fresh.astype(ml_dtypes.bfloat16),
        "uniform": draw.uniform(-bound, bound, (1024, 768)).astype(np.float32),
        "scaled rows": (fresh * draw.uniform(0.9, 1.1, (1024, 1))).astype(np.float32),
        "moved": (fresh + draw.normal(0, 0.003, fresh.shape)).astype(np.float32),
        "small": fresh[:32].astype(np.float32),
    }
    make.write_safetensors(tmp_path / "m.safetensors", tensors)
    verdicts = {t.name: looks_initial(t, 0.02) is not None for t in read_header(tmp_path / "m.safetensors")}
    assert verdicts == {"normal": True, "uniform": True, "scaled rows": False, "moved": False, "small": False}
