"""A parameter that nobody loaded holds what was in memory: whatever that is, its step is named and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace_analysis.comparison.tolerance import LOST
from eagle_trace_analysis.replay.replay import measure
from tests.support.plant_edits import HEAD, Q, rename
from tests.support.planted import Edit, Planted, run

pytestmark = pytest.mark.slow

NORM = "layers.0.post_attention_layernorm.weight"
GATE = "layers.0.mlp.gate_proj.weight"
SITES = {Q: "layer.0.attn.q", NORM: "layer.0.mlp.norm", GATE: "layer.0.mlp.gate", HEAD: "logits"}

Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]
GARBAGE: dict[str, Draw] = {
    "small integers read as floats": lambda draw, shape: draw.integers(0, 3000, shape, dtype=np.int32).view(np.float32),
    "huge": lambda draw, shape: draw.standard_normal(shape) * 1e38,
    "any exponent": lambda draw, shape: draw.standard_normal(shape) * 10.0 ** draw.integers(-44, 37, shape),
    "zeros": lambda _, shape: np.zeros(shape),
}


def filled(name: str, draw: Draw) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = draw(np.random.default_rng(1), tensors[name].shape).astype(np.float32)

    return edit


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", SITES)
def test_garbage_in_a_parameter_is_named_at_its_step_and_nothing_behind_it_is_accused(
    name: str, kind: str, tmp_path: Path
) -> None:
    tensors = filled(name, GARBAGE[kind])
    case = Planted(kind, None, None, stored=rename(name, f"unknown.{name}"), serve_tensors=tensors)
    result, _, _ = run(case, tmp_path)
    assert result.diagnosis is not None
    assert result.first_divergence is not None
    assert result.first_divergence.site == SITES[name]
    assert {one.cause for one in result.diagnosis.confirmed} - {"nonfinite"} == {"weights-differ"}
    assert not result.diagnosis.unexplained, result.diagnosis.unexplained


@pytest.mark.parametrize("dtype", LOST)
def test_digits_that_a_dtype_has_lost_are_no_fault_and_those_it_has_are(dtype: str) -> None:
    y = np.random.default_rng(1).standard_normal((40, 64)) * LOST[dtype]
    allowed = {"rho_median": 1e-3, "rho_max": 4e-3, "channel_median": 2e-3}
    for scale, reproduced in ((1e-5, True), (1.0, False)):
        x = y * scale * 1.5
        found = measure(x, y * scale, allowed, lost=LOST[dtype])
        assert found.reproduced is reproduced, (dtype, scale, found)
