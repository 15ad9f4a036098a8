"""Metrics are what their formulas say, in any dtype and blocking, also at zero, infinity and NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from eagle_trace.capture import row_statistics
from eagle_trace_analysis.comparison import sums
from eagle_trace_analysis.comparison.metrics import (
    counted_flips,
    logit_metrics,
    quantile,
    ratio,
    relative_error,
    stats_error,
    t_statistic,
)
from eagle_trace_analysis.comparison.sums import Accumulator, Sums


def accumulate(x: np.ndarray, y: np.ndarray, *, logits: bool = False, split: int | None = None) -> Sums:
    total = Accumulator(y.shape[1], len(y), logits=logits)
    for start in range(0, len(y), split or len(y)):
        stop = start + (split or len(y))
        total.add(x[start:stop], y[start:stop])
    return total.sums


def pair(rows: int = 40, width: int = 96, error: float = 1e-3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.standard_normal((rows, width)).astype(np.float32)
    return (y * (1 + error * rng.standard_normal((rows, width)))).astype(np.float32), y


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("split", [None, 1, 7])
def test_sums_are_those_of_float64(dtype: type, split: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK_ELEMENTS", 1000)
    x, y = (side.astype(dtype) for side in pair(error=0.05))
    total = accumulate(x, y, split=split)
    x, y = x.astype(np.float64), y.astype(np.float64)
    found = total.result()
    rho = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    channel = np.sqrt(((x - y) ** 2).mean(axis=0) / (y**2).mean(axis=0))
    assert np.allclose(total.rho, rho, rtol=1e-5)
    assert found.rho_max == pytest.approx(rho.max(), rel=1e-5)
    assert found.rho_median in total.rho
    assert found.channel_max == pytest.approx(channel.max(), rel=1e-5)
    assert found.channel_worst == channel.argmax()
    assert found.scale_median == pytest.approx(np.median((x * y).sum(axis=1) / (y * y).sum(axis=1)), abs=1e-3)
    bias = (x - y).mean(axis=1) / np.sqrt((y * y).mean(axis=1))
    assert found.bias == pytest.approx(bias.mean(), rel=1e-3)
    assert found.bias_t == pytest.approx(bias.mean() / (bias.std(ddof=1) / np.sqrt(len(bias))), rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 101, 4097])
def test_a_quantile_is_numpys_higher_one(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    values[count // 2] = np.inf
    for q in (0.0, 0.5, 0.99, 1.0):
        assert quantile(values, q) == np.quantile(values, q, method="higher")
    assert quantile(np.zeros(0), 0.5) == 0.0


def test_zero_over_zero_is_zero_and_something_over_zero_is_infinite() -> None:
    assert ratio(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 2.0])).tolist() == [0.0, np.inf, 0.5]
    assert relative_error(np.array([0.0, 4.0]), np.array([0.0, 1.0])).tolist() == [0.0, 2.0]
    y = np.zeros((3, 4), dtype=np.float32)
    x = y.copy()
    x[1, 2] = 1e-30
    total = accumulate(x, y)
    assert total.rho.tolist() == [0.0, np.inf, 0.0]
    found = total.result()
    assert (found.rho_median, found.rho_max, found.channel_median, found.channel_max) == (
        0.0,
        np.inf,
        0.0,
        np.inf,
    )
    assert found.scale_median == 1.0


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_sizes_that_cannot_be_squared_in_float32_are_measured_alike(scale: float) -> None:
    x, y = pair(error=1e-3)
    usual = accumulate(x, y).result()
    scaled = accumulate(x * np.float32(scale), y * np.float32(scale)).result()
    assert scaled.rho_median == pytest.approx(usual.rho_median, rel=1e-3)
    assert scaled.channel_median == pytest.approx(usual.channel_median, rel=1e-3)
    assert scaled.nonfinite_serve == 0


def test_non_finite_elements_are_counted_and_do_not_hide_the_rest() -> None:
    x, y = pair()
    clean = accumulate(x, y).result()
    x[3, 5], x[3, 6], y[7, 1] = np.nan, np.inf, -np.inf
    total = accumulate(x, y)
    found = total.result()
    assert (found.nonfinite_train, found.nonfinite_serve) == (1, 2)
    assert np.flatnonzero(total.faulty).tolist() == [3, 7]
    assert found.rho_median == pytest.approx(clean.rho_median, rel=0.1)
    assert found.channel_median == pytest.approx(clean.channel_median, rel=0.1)
    assert np.isfinite([found.rho_max, found.channel_max, found.bias]).all()


def test_the_same_infinity_on_both_sides_is_a_mask_and_no_fault() -> None:
    x, y = pair()
    x[:, 9] = y[:, 9] = -np.inf
    found = accumulate(x, y, logits=True).result()
    assert (found.nonfinite_train, found.nonfinite_serve) == (0, 0)
    assert found.kl_max is not None
    assert found.kl_max < 1e-4


def test_an_infinity_of_another_sign_is_a_fault() -> None:
    x, y = pair()
    x[0, 0], y[0, 0] = np.inf, -np.inf
    found = accumulate(x, y).result()
    assert (found.nonfinite_train, found.nonfinite_serve) == (1, 1)


def test_scale_tells_a_wrong_size_from_a_wrong_direction() -> None:
    _, y = pair()
    longer = accumulate(y * np.float32(1.045), y).result()
    assert longer.rho_median == pytest.approx(0.045, rel=1e-4)
    assert longer.scale_median == pytest.approx(1.045, rel=1e-5)
    other = accumulate(pair(seed=1)[1], y).result()
    assert abs(other.scale_median or 0.0) < 0.3
    assert other.rho_median > 1


def test_one_huge_channel_does_not_hide_504_of_512_wrong_ones() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((30, 512)).astype(np.float32)
    y[:, 0] = 1e5
    x = y.copy()
    x[:, 8:] = rng.standard_normal((30, 504))
    found = accumulate(x, y).result()
    assert found.rho_max < 1e-3
    assert found.channel_median is not None
    assert found.channel_median > 1


def test_a_constant_bias_has_an_infinite_t_and_noise_a_small_one() -> None:
    assert t_statistic(np.full(5, 0.5)) == np.inf
    assert t_statistic(np.full(5, -0.5)) == -np.inf
    assert t_statistic(np.zeros(5)) == 0.0
    assert abs(t_statistic(np.random.default_rng(0).standard_normal(1000))) < 4
    assert t_statistic(np.ones(1)) == 0.0


def test_logit_metrics_are_those_of_the_softmax() -> None:
    rng = np.random.default_rng(0)
    y = (3 * rng.standard_normal((20, 50))).astype(np.float32)
    x = (y + rng.standard_normal((20, 50))).astype(np.float32)
    found = logit_metrics(x, y)
    p, q = (
        np.exp(side.astype(np.float64)) / np.exp(side.astype(np.float64)).sum(axis=1, keepdims=True) for side in (y, x)
    )
    assert np.allclose(found.kl, (p * np.log(p / q)).sum(axis=1), atol=2e-6)
    assert np.allclose(found.tv, 0.5 * np.abs(p - q).sum(axis=1), atol=2e-6)
    assert np.allclose(found.largest_error, np.abs(x - y).max(axis=1))
    assert found.flip.tolist() == (x.argmax(axis=1) != y.argmax(axis=1)).tolist()
    expected = y.max(axis=1) - y[np.arange(20), x.argmax(axis=1)]
    assert np.allclose(found.margin, expected)


def test_equal_logits_have_no_divergence() -> None:
    y = np.random.default_rng(0).standard_normal((5, 32_000)).astype(np.float32)
    found = logit_metrics(y.copy(), y)
    assert found.kl.max() < 2e-6
    assert found.tv.max() == 0.0
    assert not found.flip.any()


def test_a_row_of_infinities_gives_no_nan() -> None:
    y = np.full((2, 5), -np.inf, dtype=np.float32)
    found = logit_metrics(y.copy(), y)
    assert np.isfinite([found.kl, found.tv, found.largest_error, found.margin]).all()


def test_a_flip_counts_only_beyond_twice_the_largest_error() -> None:
    assert counted_flips(np.array([0.19, 0.21]), np.array([0.1, 0.1])).tolist() == [False, True]
    # errors on the two logits alone can always explain a flip of the logits' own argmax
    rng = np.random.default_rng(0)
    y = rng.standard_normal((500, 20)).astype(np.float32)
    x = (y + 0.3 * rng.standard_normal(y.shape)).astype(np.float32)
    found = logit_metrics(x, y)
    assert found.flip.any()
    assert not counted_flips(found.margin, found.largest_error).any()


def test_statistics_never_show_more_than_the_values() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((200, 64)).astype(np.float32)
    x = (y + 0.05 * rng.standard_normal(y.shape)).astype(np.float32)
    bound = stats_error(row_statistics(x), row_statistics(y), 64)
    rho = accumulate(x, y).rho
    assert np.quantile(bound, 0.5) < np.quantile(rho, 0.5)
    assert (bound <= 1.5 * rho).all()
    assert stats_error(row_statistics(y), row_statistics(y), 64).max() == 0.0


def test_nothing_added_gives_a_result_all_the_same() -> None:
    found = Accumulator(4, 0).sums.result()
    assert (found.rows, found.rho_max, found.bias_t) == (0, 0.0, 0.0)
