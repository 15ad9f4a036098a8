"""A diff by sketches: healthy pairs agree, faults are named where they are, and the error is stated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.capture import Rows
from eagle_trace.sketch import reduce_rows, unscale
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.comparison.sketch import estimated_rho, sketch_metrics, widened
from eagle_trace_analysis.comparison.sums import Accumulator
from eagle_trace_analysis.comparison.tolerance import SCALE, Tolerance, analytic_floor
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed
from eagle_trace_analysis.report.html import render_html
from eagle_trace_analysis.report.json import to_json
from eagle_trace_analysis.report.show import row
from eagle_trace_analysis.report.text import render
from tests.support import synthetic
from tests.support.pairs import DRAFT, TARGET
from tests.support.planted import Planted, run
from tests.support.planted_faults import faults
from tests.support.relevel import at_level
from tests.support.synthetic import F64, Draft, Prompt, Side, make_prompts, only, value_sites, write_trace

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[3] / "golden"
CHAINS = make_prompts(2)
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """A synthetic draft whose rows are wider than a sketch."""
    with mock.patch.multiple(synthetic, HIDDEN=160, INTERMEDIATE=320, DRAFT_VOCAB=200, TARGET_VOCAB=300):
        yield


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Trace]:
    def make(side: str, level: str = "sketch", *, draft: Any = None, features: Any = None, **options: Any) -> Trace:
        path = tmp_path / f"{side}{len(list(tmp_path.iterdir()))}.trace"
        given = {} if features is None else {"features": features}
        return write_trace(path, Side(side, level=level, **options), CHAINS, draft=draft, **given)

    return make


def first(result: Diff) -> tuple[str, int, str]:
    found = result.first_divergence
    assert found is not None
    return found.site, found.step, found.kind


# ---- healthy pairs


def measured(x: Any, y: Any, dtype: str) -> tuple[Metrics, Metrics]:
    """Metrics of rows by their values, and by their sketches as stored."""
    by_values = Accumulator(x.shape[1], len(x))
    by_values.add(x, y)
    sides = [reduce_rows(one, dtype, sketched=True) for one in (x, y)]
    sums = [unscale(one.sketch, one.statistics.norm) for one in sides if one.sketch is not None]
    total = Accumulator(sums[0].shape[1], len(x))
    total.add(*sums)
    total = total.sums
    a, b = (one.statistics for one in sides)
    return by_values.sums.result(), sketch_metrics(total, estimated_rho(total, b), a, b, x.shape[1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", TYPES)
def test_what_agrees_by_its_values_agrees_by_its_sketches(dtype: str, seed: int) -> None:
    """Pairs whose values are exactly as far apart as is allowed: the estimates stay within what is allowed of them."""
    rng = np.random.default_rng(seed)
    for width in (80, 128, 576, 1536):
        rows = int(rng.choice([1, 3, 20, 100]))
        scale = np.exp(rng.choice([0, 0.5, 1.5]) * rng.standard_normal(width))
        if seed % 2:
            scale[rng.integers(width, size=3)] *= 10 ** rng.uniform(1, 3)
        constant = rng.choice([0, 0.5, 1.0])
        clean = scale * (
            constant * rng.standard_normal(width) + (1.001 - constant) * rng.standard_normal((rows, width))
        )
        size = UNIT[dtype] * 5 * (np.abs(clean) if seed % 3 else np.sqrt((clean**2).mean(axis=1, keepdims=True)))
        x, y = ((clean + size * rng.uniform(-1, 1, clean.shape)).astype(TYPES[dtype]) for _ in range(2))
        values, sketches = measured(x, y, dtype)
        assert values.channel_median is not None
        assert values.scale_median is not None
        allowed = {name: getattr(values, name) for name in ("rho_median", "rho_max", "channel_median")}
        if dtype != "float32":
            allowed[SCALE] = max(abs(values.scale_median - 1), analytic_floor(1, dtype))
        tolerance = widened(Tolerance(allowed, None, allowed, 1, dtype, ""), width, rows)
        assert tolerance.exceeded(sketches) == [], (width, rows, sketches, tolerance)
        # an estimate, not a bound
        assert sketches.rho_median == pytest.approx(values.rho_median, rel=0.4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", TYPES)
def test_a_healthy_pair_agrees(dtype: str, seed: int, write: Any) -> None:
    draft = Draft(seed)
    levels = [("sketch", "sketch"), ("values", "sketch"), ("sketch", "values")][seed % 3]
    result = diff(
        *(
            write(side, level, draft=draft, dtype=dtype, noise_seed=2 * seed + at)
            for at, (side, level) in enumerate(zip(("train", "serve"), levels, strict=True))
        )
    )
    assert result.verdict == "agree", result.first_divergence
    assert result.level == "sketch"
    compared = {one.site for one in result.sites if isinstance(one.metrics, Metrics) and one.metrics.basis == "sketch"}
    assert compared == set(value_sites())


def test_float32_against_bfloat16_is_rounding_of_bfloat16(write: Any) -> None:
    assert diff(write("train"), write("serve", dtype="bfloat16")).verdict == "agree"


# ---- faults


@pytest.mark.parametrize("site", value_sites()[::3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_is_named_where_it_is_planted(site: str, dtype: str, write: Any) -> None:
    fault = only(site, 0, lambda _, values: values[:, ::-1].copy())
    found = diff(write("train", dtype=dtype), write("serve", dtype=dtype, noise_seed=3, fault=fault))
    assert first(found) == (site, 0, "values")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_error_of_4_5_percent_is_found(dtype: str, write: Any) -> None:
    for site in ("fc.out", "layer.0.mlp.out"):
        fault = only(site, 1 if site != "fc.out" else 0, lambda _, values: values * 1.045)
        found = diff(write("train", dtype=dtype), write("serve", dtype=dtype, noise_seed=3, fault=fault))
        assert first(found)[0] == site
        scale = next(one.metrics for one in found.sites if one.divergence == found.first_divergence)
        assert isinstance(scale, Metrics)
        assert scale.scale_median == pytest.approx(1.045, abs=5e-3)


def test_a_single_wrong_row_is_found(write: Any) -> None:
    def one_row(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[(rows.prompt_id == 1) & (rows.root == 9)] *= 1.01
        return values

    found = diff(write("train"), write("serve", fault=only("embed", 0, one_row)))
    assert first(found) == ("embed", 0, "values")
    assert found.first_divergence is not None
    assert found.first_divergence.root == 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_channels_behind_one_that_is_1000_times_larger_are_found(dtype: str, write: Any) -> None:
    """512 channels, one of them huge, 500 of the others wrong: the norm does not show it, the buckets do."""

    def features(prompt: Prompt) -> F64:
        made = synthetic.default_features(prompt)
        made[:, 3] = 1000 * made.std()
        return made

    def wrong(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[:, 12:] = np.random.default_rng(0).standard_normal(values[:, 12:].shape)
        return values

    with mock.patch.multiple(synthetic, HIDDEN=512):
        train = write("train", dtype=dtype, features=features)
        serve = write("serve", dtype=dtype, features=features, fault=only("target.hidden.0", 0, wrong))
        found = diff(train, serve)
    assert first(found) == ("target.hidden.0", 0, "values")
    assert found.first_divergence is not None
    if dtype == "bfloat16":
        # rho alone is within 4 floors and more
        assert found.first_divergence.statistic == "channel_median"
        assert found.first_divergence.value is not None
        assert found.first_divergence.value > 0.5


def test_nan_is_named(write: Any) -> None:
    def nan(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[2, 5] = np.nan
        return values

    found = diff(write("train"), write("serve", fault=only("layer.0.mlp.up", 0, nan)))
    assert first(found) == ("layer.0.mlp.up", 0, "nonfinite")


@pytest.mark.parametrize(("serve", "place"), [("healthy", None), ("broken", "fused")])
def test_recorded_pairs_part_where_their_values_do(serve: str, place: str | None, tmp_path: Path) -> None:
    sides = [at_level(open_trace(GOLDEN / f"{name}.trace"), tmp_path / name, "sketch") for name in ("train", serve)]
    found = diff(*sides).first_divergence
    assert (found.site if found else None) == place


# ---- what is said


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Trace]]:
    """The demo pair in numpy with and without a fault, by level of both sides."""
    made = {}
    for case in (Planted("healthy", None, None), next(one for one in faults() if one.name == "norm-eps")):
        folder = tmp_path_factory.mktemp(case.name)
        _, train, serve = run(case, folder)
        low = [at_level(one, folder / f"{one.side}-sketch", "sketch") for one in (train, serve)]
        made |= {
            f"{case.name} values sketch": (train, low[1]),
            f"{case.name} sketch values": (low[0], serve),
            f"{case.name} sketch sketch": (low[0], low[1]),
        }
    return made


@pytest.mark.parametrize("levels", ["values sketch", "sketch values", "sketch sketch"])
@pytest.mark.parametrize("name", ["healthy", "norm-eps"])
def test_causes_that_need_values_say_so(name: str, levels: str, planted: dict[str, tuple[Trace, Trace]]) -> None:
    train, serve = planted[f"{name} {levels}"]
    result = diagnosed(diff(train, serve), train, serve, Checkpoints(train_draft=DRAFT, target=TARGET))
    assert result.diagnosis is not None
    verdicts = {one.cause: one for one in result.diagnosis.causes}
    if name == "healthy":
        assert not result.diagnosis.confirmed
    assert verdicts["features-permuted"].verdict == "not_tested"
    assert verdicts["features-permuted"].evidence.startswith("recorded at level sketch")
    if levels != "sketch values":
        assert verdicts["norm-eps"].verdict == "not_tested"
        assert verdicts["norm-eps"].evidence.startswith("recorded at level sketch")
        assert "--level values" in str(verdicts["norm-eps"].fix)
    # what needs shapes, tokens, parameters and best ids alone is looked at all the same
    for cause in ("single-layer-features", "weights-dropped", "d2t-absolute", "tokens-differ", "nonfinite"):
        assert verdicts[cause].verdict == "ruled_out", verdicts[cause]


def test_the_error_of_the_estimates_is_stated(planted: dict[str, tuple[Trace, Trace]]) -> None:
    result = diff(*planted["norm-eps sketch sketch"])
    words = "row errors are estimates, +-9% (1 sigma) a row"
    assert f"sketch: {words}" in render(result)
    assert words in render_html(result)
    data = to_json(result)
    assert data["row_error"] == pytest.approx(0.0884, abs=1e-4)
    assert data["level"] == "sketch"
    assert {"name": "sketch", "text": words} in data["notes"]
    site = next(one for one in data["sites"] if one["site"] == "embed")
    assert site["metrics"]["basis"] == "sketch"


def test_row_by_row_figures_are_estimates(planted: dict[str, tuple[Trace, Trace]]) -> None:
    train, serve = planted["norm-eps sketch sketch"]
    exact, low = (
        RowFigures(planted["norm-eps values sketch"][0], planted["norm-eps sketch values"][1]),
        RowFigures(train, serve),
    )
    a, b = (one.site("layer.0.embed_norm", one.rows()) for one in (exact, low))
    assert a is not None
    assert b is not None
    np.testing.assert_allclose(b.error, a.error, rtol=0.4)
    np.testing.assert_array_equal(b.train_norm, a.train_norm)


def test_show_prints_what_is_there(planted: dict[str, tuple[Trace, Trace]]) -> None:
    _, serve = planted["healthy sketch sketch"]
    (found,) = row(serve, "embed", 0, int(serve.keys("embed").root[0]))["rows"]
    assert found["values"] is None
    np.testing.assert_allclose(found["sketch"], serve.sketch("embed")[0])
