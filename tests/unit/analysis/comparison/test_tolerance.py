"""Tolerances: the analytic floor is what rounding does, it grows along the dataflow, and the larger floor
decides.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from eagle_trace.sites import draft_sites
from eagle_trace_analysis import Metrics, Tolerances
from eagle_trace_analysis.comparison.tolerance import FACTOR, analytic_floor, lower_dtype, sources
from tests.support.synthetic import Side, make_prompts, write_trace

SITES = draft_sites()
WIDTHS = {site.name: 64 for site in SITES}


def floor(site: str, step: int = 0, dtype: str = "float32", size: float = 1e-5, **changes: Any) -> dict[str, Any]:
    names = [f"{kind}_{what}" for kind in ("rho", "channel") for what in ("median", "p99", "max")]
    row = {"site": site, "step": step, "dtype": dtype, "reference": "float64", "rows": 100} | dict.fromkeys(names, size)
    return row | changes


@pytest.fixture
def tolerances(tmp_path: Path):
    prompts = make_prompts(1)
    serve = write_trace(tmp_path / "serve", Side("serve"), prompts)

    def make(dtype: str = "float32", floors: tuple = (), **settings: Any) -> Tolerances:
        side = Side("train", dtype=dtype, settings=settings)
        train = write_trace(tmp_path / f"train{len(list(tmp_path.iterdir()))}", side, prompts, floors=floors)
        return Tolerances(SITES, train, serve, WIDTHS)

    return make


@pytest.mark.parametrize(
    ("dtype", "unit"), [(ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float16"), (np.float32, "float32")]
)
def test_one_rounding_has_the_error_that_the_formula_says(dtype: Any, unit: str) -> None:
    x = np.exp(np.random.default_rng(0).uniform(-3, 3, 200_000))
    error = np.sqrt(np.mean((x.astype(dtype).astype(np.float64) / x - 1) ** 2))
    assert error == pytest.approx(analytic_floor(0.5, unit), rel=0.02)


def test_roundings_grow_along_the_dataflow_and_over_the_steps(tolerances: Any) -> None:
    found = tolerances()
    chain = [
        "target.hidden.0",
        "fc.in",
        "fc.out",
        "layer.0.hidden_norm",
        "layer.0.attn.q",
        "layer.0.attn.context",
        "logits",
    ]
    counts = [found.roundings(site, 0, "bfloat16") for site in chain]
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)
    assert [found.roundings(site, 0, "bfloat16") for site in ("token", "embed", "target.hidden.0")] == [
        0,
        1,
        1,
    ]
    by_step = [found.roundings("logits", step, "bfloat16") for step in range(4)]
    assert all(15 < b - a < 30 for a, b in pairwise(by_step))
    assert found.roundings("hidden", 1, "bfloat16") == found.roundings("carry", 0, "bfloat16")
    # the embedding starts anew at each step
    assert found.roundings("embed", 3, "bfloat16") == 1


def test_float32_products_also_count_how_they_are_summed(tolerances: Any) -> None:
    found = tolerances()
    assert found.roundings("fc.out", 0, "float32") == found.roundings("fc.out", 0, "bfloat16") + 64 / 128
    assert found.roundings("embed", 0, "float32") == 1


def test_attention_depends_on_the_cache_of_every_step_before() -> None:
    by_name = {site.name: site for site in SITES}
    found = sources(by_name, "layer.0.attn.context", 2)
    assert {step for name, step in found if name == "layer.0.attn.k_rope"} == {0, 1, 2}
    assert sources(by_name, "hidden", 2) == [("carry", 1)]
    assert sources(by_name, "hidden", 0) == [("fc.out", 0), ("fused", 0)]


def test_the_larger_floor_decides_for_each_statistic(tolerances: Any) -> None:
    found = tolerances(floors=(floor("fc.out", size=1e-5, channel_median=1e-12),)).of("fc.out", 0)
    assert found.allowed["rho_median"] == pytest.approx(FACTOR * 1e-5)
    assert found.allowed["channel_median"] == FACTOR * found.analytic["channel_median"]
    assert "measured" in found.source
    assert "analytic" in tolerances().of("fc.out", 0).source


def test_a_floor_of_another_dtype_is_not_used_and_that_is_said(tolerances: Any) -> None:
    found = tolerances(floors=(floor("fc.out", dtype="bfloat16", size=1.0),))
    assert found.of("fc.out", 0).measured is None
    assert "bfloat16" in found.provenance
    assert "analytic only" in tolerances().provenance


def test_a_step_without_a_floor_takes_the_one_before_it(tolerances: Any) -> None:
    found = tolerances(floors=(floor("carry", step=1, size=1e-3),))
    assert found.of("carry", 5).measured == found.of("carry", 1).measured
    assert found.of("carry", 0).measured is None


def test_the_lower_precision_of_the_two_sides_decides(tolerances: Any) -> None:
    assert tolerances("bfloat16").dtype == "bfloat16"
    assert lower_dtype(["float32", "float16"]) == "float16"
    assert lower_dtype(["", "int8"]) == "float32"
    assert tolerances().of("embed", 0, ["float16"]).dtype == "float16"


def test_features_computed_apart_are_allowed_to_drift_unless_that_was_measured(tolerances: Any) -> None:
    shared, apart = tolerances("bfloat16"), tolerances("bfloat16", features="compute")
    measured = tolerances("bfloat16", features="compute", floors=(floor("target.hidden.0", dtype="bfloat16"),))
    allowed = [one.of("target.hidden.0", 0).allowed["rho_median"] for one in (shared, apart, measured)]
    assert allowed[0] == allowed[2] < allowed[1] < 0.5
    # one layer off is a difference of 0.9 % at the very least: float32 still sees it
    assert tolerances(features="compute").of("target.hidden.0", 0).allowed["rho_max"] < 9e-3


def test_each_statistic_is_judged_by_its_own_floor(tolerances: Any) -> None:
    tolerance = tolerances(floors=(floor("fc.out"),)).of("fc.out", 0)
    good = Metrics(50, 1e-6, 1e-6, 1e-6, 0, 0, "values", channel_median=1e-6, channel_p99=1e-6, channel_max=1.0)
    assert tolerance.exceeded(good) == []
    for name in ("rho_median", "rho_max", "channel_median"):
        assert tolerance.exceeded(replace(good, **{name: 1e-2})) == [name]
    assert tolerance.exceeded(replace(good, rho_max=float("nan"))) == ["rho_max"]
    # the tail of the channels is reported, not judged
    assert tolerance.exceeded(replace(good, channel_p99=1e-2)) == []


def test_scale_is_judged_in_16_bit_dtypes_where_it_sees_more_than_rho(tolerances: Any) -> None:
    tolerance = tolerances("bfloat16").of("layer.0.mlp.out", 2)
    good = Metrics(50, 1e-2, 1e-2, 1e-2, 0, 0, "values", scale_median=1.003)
    assert tolerance.exceeded(good) == []
    assert tolerance.exceeded(replace(good, rho_median=0.045, scale_median=1.045)) == ["scale_median"]
    assert tolerance.exceeded(replace(good, scale_median=0.955)) == ["scale_median"]
    assert "scale_median" not in tolerances().of("layer.0.mlp.out", 2).allowed


def test_a_drift_measured_in_another_dtype_does_not_count_as_measured(tolerances: Any) -> None:
    floors = (floor("target.hidden.0", dtype="float32"),)
    found = tolerances("bfloat16", features="compute", floors=floors).of("target.hidden.0", 0)
    assert found.roundings > 100
