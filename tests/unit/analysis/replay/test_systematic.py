"""Faults under the rounding: what is systematic is found whatever its size, and what rounding does is not accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from eagle_trace.capture import DTYPES
from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.params import same, shown_at
from eagle_trace_analysis.comparison.tolerance import UNIT
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed, judge
from eagle_trace_analysis.replay.systematic import FEWEST_ROWS, Limits, Systematic, systematic
from eagle_trace_analysis.report.json import to_json
from eagle_trace_analysis.report.text import render
from tests.support.endings import ending_of
from tests.support.planted import Planted, run
from tests.support.relevel import at_level

Real = np.ndarray[Any, Any]
T, C = 96, 128
DOWN, OUT = "layers.0.mlp.down_proj.weight", "layers.0.self_attn.o_proj.weight"
NORM = "layers.0.post_attention_layernorm.weight"


# ---- the figures ---------------------------------------------------------------------------------------------------


def product(seed: int) -> Real:
    """Rows of a product: alike in part, with channels of very different sizes."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((T, 8)) @ draw.standard_normal((8, C)) + draw.standard_normal((T, C))
    return rows * np.exp(draw.standard_normal(C)) + 3 * draw.standard_normal(C)


def rounded(rows: Real, dtype: str) -> Real:
    return rows.astype(DTYPES[dtype]).astype(np.float64)


def looked_at(recorded: Real, expected: Real, dtype: str, roundings: float = 2.0, *, matmul: bool = True) -> Systematic:
    found = systematic(recorded, expected, np.arange(C), Limits.of(UNIT[dtype], roundings, product=matmul))
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(8))
def test_rounding_alone_is_no_fault(dtype: str, seed: int) -> None:
    y = product(seed)
    found = looked_at(rounded(y, dtype), y, dtype)
    assert found.excess() < 0.7
    assert abs(found.scale - 1) < 6 * found.scale_error + 1e-12


@pytest.mark.parametrize("factor", [1.005, 0.995, 1.002])
def test_a_common_scale_is_measured(factor: float) -> None:
    y = product(1)
    found = looked_at(rounded(factor * y, "bfloat16"), y, "bfloat16")
    assert found.excess(looked_at(rounded(y, "bfloat16"), y, "bfloat16")) > 1
    assert found.scale == pytest.approx(factor, abs=5e-4)
    assert abs(found.scale - factor) < 6 * found.scale_error
    assert found.words() == f"scale {found.scale:.5f} +- {found.scale_error:.5f}"


def test_one_channel_is_named_with_its_scale() -> None:
    y = product(2)
    x = y.copy()
    x[:, 41] *= 1.02
    found = looked_at(rounded(x, "bfloat16"), y, "bfloat16")
    assert found.channel == 41
    assert found.channel_scale == pytest.approx(1.02, abs=1e-3)
    assert "channel 41 has scale 1.0" in found.words()


def test_an_offset_is_named() -> None:
    draw = np.random.default_rng(3)
    y = product(3)
    y -= y.mean(axis=0)
    x = y + 0.02 * y.std(axis=0) * draw.choice([-1, 1], C)
    assert "an offset of 2." in looked_at(rounded(x, "bfloat16"), y, "bfloat16").words()


def test_equal_and_nearly_equal_rows_are_rounded_alike_and_that_is_no_fault() -> None:
    y = np.repeat(product(4)[:6], 16, axis=0)
    assert systematic(rounded(y, "bfloat16"), y, np.arange(C), Limits.of(2.0**-8, 2, product=True)) is None
    y = y * (1 + 1e-4 * np.random.default_rng(4).standard_normal(y.shape))
    assert looked_at(rounded(y, "bfloat16"), y, "bfloat16").excess() < 1


def test_a_norm_weight_one_digit_below_one_is_rounded_to_one_side_and_that_is_no_fault() -> None:
    y = rounded(product(5), "bfloat16") * (1 - 2.0**-8)
    found = looked_at(rounded(y, "bfloat16"), y, "bfloat16", 3.0, matmul=False)
    assert abs(found.scale - 1) > 0.2 * 2.0**-8
    assert found.coherent_z > 8
    assert found.excess() < 1


def test_what_is_lost_in_a_large_stream_is_no_fault() -> None:
    stream = rounded(256 + 100 * np.abs(product(6)), "bfloat16")
    y = stream + 0.2 * product(7)
    found = looked_at(rounded(y, "bfloat16"), y, "bfloat16", matmul=False)
    assert found.excess() < 1


def test_a_slope_that_stands_on_one_huge_row_is_not_believed() -> None:
    y = product(8)
    x = rounded(y, "bfloat16")
    y[5] *= 1e4
    x[5] = y[5] * 1.02
    assert looked_at(x, y, "bfloat16").channel is None


def test_dead_channels_nonfinite_ones_and_too_few_rows_are_left_out() -> None:
    y = product(9)
    y[:, 3] = 0
    x = rounded(y, "bfloat16")
    x[7, 9] = np.nan
    found = looked_at(x, y, "bfloat16")
    assert np.isfinite([found.scale, found.coherent, found.offset]).all()
    few = slice(0, FEWEST_ROWS - 1)
    assert systematic(x[few], y[few], np.arange(C), Limits.of(2.0**-8, 2)) is None
    assert systematic(0 * x, 0 * y, np.arange(C), Limits.of(2.0**-8, 2)) is None


@pytest.mark.parametrize("size", [1e7, 1e20, 1e36, np.inf])
def test_memory_that_nobody_wrote_is_wrong_by_its_size_alone(size: float) -> None:
    y = product(10).astype(np.float32)
    for x in (y * np.float32(size), y + np.float32(size)):
        assert systematic(x, y, np.arange(C), Limits.of(2.0**-24, 2, product=True)) is None
        # rows that were computed from such rows
        assert systematic(y, np.full_like(y, size), np.arange(C), Limits.of(2.0**-24, 2)) is None


# ---- steps of a healthy pair, held against other weights -----------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Diff, Context]:
    result, train, serve = run(Planted("healthy", None, None), tmp_path_factory.mktemp("healthy"), request.param)
    return result, Context(result, train, serve)


def test_no_step_of_a_healthy_pair_is_accused(pair: tuple[Diff, Context]) -> None:
    result = pair[0]
    assert result.verdict == "agree"
    assert result.diagnosis is not None
    assert not result.diagnosis.faulty
    found = [one.serve.systematic for one in result.diagnosis.replay if one.serve is not None]
    assert max(one.excess() for one in found if one is not None) < 0.7
    text = " ".join(render(result).split())
    assert "steps of the server follow from its own inputs as trained" in text
    assert "the target's features are held against each other alone" in text


def test_without_the_trained_weights_it_is_said_that_no_step_was_recomputed(
    pair: tuple[Diff, Context], tmp_path: Path
) -> None:
    nowhere = Checkpoints(train_draft=tmp_path / "gone", serve_draft=tmp_path / "gone", target=tmp_path / "gone")
    text = " ".join(render(diagnosed(pair[0], pair[1].train, pair[1].serve, nowhere)).split())
    assert "every step by itself not recomputed (the trained draft cannot be read" in text
    assert "a fault within the tolerance would not be seen" in text


def int8(rows: Real) -> Real:
    step = np.abs(rows).max(axis=-1, keepdims=True) / 127
    return np.round(rows / step) * step


def fp8(rows: Real) -> Real:
    step = np.abs(rows).max() / 448
    return (rows / step).astype(ml_dtypes.float8_e4m3fn).astype(rows.dtype) * step


def low_rank(rows: Real) -> Real:
    draw = np.random.default_rng(3)
    change = draw.standard_normal((len(rows), 4)) @ draw.standard_normal((4, rows.shape[1]))
    return rows + change * 0.005 * np.linalg.norm(rows) / np.linalg.norm(change)


def one_row(rows: Real) -> Real:
    out = rows.copy()
    out[7] *= 1.02
    return out


def one_element(weight: Real) -> Real:
    out = weight.copy()
    out[5] *= 1.02
    return out


OTHER_WEIGHTS: dict[str, tuple[str, str, Callable[[Real], Real]]] = {
    "scale 1.005": ("layer.0.mlp.out", DOWN, lambda rows: rows * 1.005),
    "scale 0.995": ("layer.0.mlp.out", DOWN, lambda rows: rows * 0.995),
    "scale 1.002": ("layer.0.mlp.out", DOWN, lambda rows: rows * 1.002),
    "one channel": ("layer.0.attn.out", OUT, one_row),
    "int8 per channel": ("layer.0.mlp.out", DOWN, int8),
    "int8 per tensor": ("layer.0.attn.out", OUT, lambda rows: int8(rows.reshape(1, -1)).reshape(rows.shape)),
    "fp8": ("layer.0.mlp.out", DOWN, fp8),
    "low rank": ("layer.0.mlp.out", DOWN, low_rank),
}


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_other_weights_are_found_in_any_dtype(name: str, pair: tuple[Diff, Context]) -> None:
    # the server's rows are held against weights that it did not have: the same as having others than trained
    site, weight, change = OTHER_WEIGHTS[name]
    replay = pair[1].replay
    assert replay is not None
    expect_faulty(pair[1], replay.varied(weights=replay.weights.edited(weight, change)), site)


def test_one_weight_of_a_norm_is_found(pair: tuple[Diff, Context]) -> None:
    replay = pair[1].replay
    assert replay is not None
    weights = replay.weights.replaced({NORM: one_element(replay.weights.whole(NORM))})
    found = expect_faulty(pair[1], replay.varied(weights=weights), "layer.0.mlp.norm")
    assert found.serve is not None
    assert found.serve.systematic is not None
    assert found.serve.systematic.channel == 5


@pytest.mark.parametrize(
    ("site", "form"),
    [("layer.0.embed_norm", {"eps": 2e-4}), ("layer.0.attn.q_rope", {"theta": 10200.0})],
)
def test_another_form_is_found(site: str, form: dict[str, float], pair: tuple[Diff, Context]) -> None:
    replay = pair[1].replay
    assert replay is not None
    rope = replay.form.rope.__class__(theta=form.get("theta", replay.form.rope.theta))
    expect_faulty(pair[1], replay.varied(eps=form.get("eps", replay.form.eps), rope=rope), site)


def test_a_control_with_the_same_habit_excuses_it(pair: tuple[Diff, Context]) -> None:
    replay, control = pair[1].replay, pair[1].control
    assert replay is not None
    assert control is not None
    sides = [one.varied(weights=one.weights.edited(DOWN, lambda rows: rows * 1.005)) for one in (replay, control)]
    assert judge(sides[0], sides[1], "layer.0.mlp.out", 0).verdict != "faulty"


def expect_faulty(context: Context, changed: Replay, site: str) -> Replayed:
    found = judge(changed, context.control, site, 0)
    assert found.verdict == "faulty", found.serve and found.serve.systematic
    return found


# ---- the verdict ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diff, Trace, Trace]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[DOWN] = 1.005 * tensors[DOWN]

    case = Planted("scaled", None, None, serve_tensors=change)
    return run(case, tmp_path_factory.mktemp("scaled"), "bfloat16")


def test_a_step_that_is_proved_faulty_is_where_the_sides_part(scaled: tuple[Diff, Trace, Trace]) -> None:
    result = scaled[0]
    (first,) = result.frontier
    assert (first.site, first.step, first.kind) == ("layer.0.mlp.out", 0, "step")
    assert result.exit_status == 1
    assert "end to end within tolerance" in first.why
    assert f"as loaded, {DOWN} is not the trained one" in first.why
    lines = ending_of(render(result))
    assert lines[0] == "diverged: layer.0.mlp.out, step 0 is not computed as trained"
    assert lines[1].startswith("within rounding end to end, but by itself: scale 1.005")
    assert max(map(len, lines)) <= 80
    (step,) = (one for one in to_json(result)["replay"] if (one["site"], one["step"]) == (first.site, 0))
    assert step["verdict"] == "faulty"
    assert step["serve"]["scale"] == pytest.approx(1.005, abs=1e-3)
    assert step["train"]["scale"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("level", ["shapes", "stats", "sketch", "values"])
def test_weights_that_are_not_the_trained_ones_never_agree(
    level: str, scaled: tuple[Diff, Trace, Trace], tmp_path: Path
) -> None:
    train, serve = (at_level(one, tmp_path / f"{one.side}.trace", level) for one in scaled[1:])
    result = diff(train, serve)
    first = result.first_divergence
    assert first is not None
    assert (result.exit_status, first.site, first.kind) == (1, "layer.0.mlp.out", "parameters")
    lines = ending_of(render(result))
    assert lines[0] == "diverged: the weights served at layer.0.mlp.out are not the trained ones"
    assert lines[1].startswith(f"{DOWN}: norm ")
    if level != "values":
        # without values no step is recomputed: the weights are what is known
        after = diagnosed(result, train, serve)
        assert after.first_divergence is not None
        assert after.first_divergence.kind == "parameters"


def test_a_fault_that_no_weight_tells_is_proved_all_the_same(tmp_path: Path) -> None:
    def longer(site: str, values: Real) -> Real:
        return values * 1.004 if site == "layer.0.attn.residual" else values

    result, _, _ = run(Planted("residual", None, None, serve={"damage": longer}), tmp_path, "bfloat16")
    (first,) = result.frontier
    assert (first.site, first.kind) == ("layer.0.attn.residual", "step")
    assert result.diagnosis is not None
    assert "layer.0.attn.residual is not computed as trained" in result.diagnosis.unexplained[0]


def row(dtype: str, norm: float, digest: str = "", shape: tuple[int, ...] = (1000, 1000)) -> dict[str, Any]:
    return {"dtype": dtype, "norm": norm, "digest": digest, "shape": list(shape), "nonfinite": 0}


def test_a_parameter_in_another_dtype_is_the_same_as_far_as_rounding_goes() -> None:
    draw = np.random.default_rng(0).standard_normal(1_000_000)
    norms = [float(np.linalg.norm(one)) for one in (draw, rounded(draw, "bfloat16"))]
    assert same(row("float32", norms[0], "a"), row("bfloat16", norms[1], "b"))
    assert not same(row("float32", norms[0], "a"), row("bfloat16", 1.002 * norms[1], "b"))
    assert not same(row("bfloat16", 1.0, "a"), row("bfloat16", 1.0, "b"))


def test_every_parameter_shows_somewhere() -> None:
    places = {
        "d2t": "topk.target_id",
        "fc_norm.1.weight": "fc.in",
        "layers.0.self_attn.q_proj.bias": "layer.0.attn.q",
        "layers.1.something.new": "layer.1.out",
        "lm_head.weight": "logits",
    }
    assert {name: shown_at(name) for name in places} == places
