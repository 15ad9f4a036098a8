"""Numbers about two sets of rows: x (serve) against y (train, the reference). Pure functions; `sums` streams them.

Conventions, everywhere: ``0 / 0 = 0`` (nothing there, nothing wrong) and ``x / 0 = inf`` (something where
    nothing
should be). Elements that are not finite are counted and then taken out of x and y alike, so that one NaN does
not hide what the rest of the row says; the same infinity on both sides (a masked logit) is not a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Statistics

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]


#: decorates what works on recorded numbers. A parameter that nobody loaded holds whatever was in memory before, so
#: sums overflow and zeros divide: that is found in the results, and no warning is of use to the reader
ANY_NUMBERS = np.errstate(all="ignore")


def ratio(numerator: Float64, denominator: Float64) -> Float64:
    """numerator / denominator for numbers >= 0, with 0/0 = 0 and x/0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numerator == 0, 0.0, numerator / denominator)


def row_sums(a_TW: Float32) -> Float32:
    """Sum of each row, float32 [T]; the same bits on every machine and with any number of threads.

    As fast as BLAS, whose order of adding depends on the processor and on its threads (NumPy's own `sum` along a
    row takes three times as long).
    """
    total: Float32 = np.einsum("tw->t", a_TW)
    return total


def relative_error(error: Float64, power: Float64) -> Float64:
    """sqrt(error / power): rho of a row (sums over its elements), or a channel's error over its RMS (sums
    over rows).
    """
    return np.sqrt(ratio(error, power))


def row_errors(x_TW: Float32 | Float64, y_TW: Float32 | Float64) -> Float64:
    """rho of each row of x against y, float64 [T]."""
    wide = y_TW.astype(np.float64)
    return relative_error(np.square(x_TW - wide).sum(axis=1), np.square(wide).sum(axis=1))


def scale_factor(cross: Float64, power: Float64) -> Float64:
    """<x, y> / <y, y>: 1.045 is a vector 4.5 % too long, 0 a wrong direction. 1 where both are zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(power == 0, 1.0, cross / power)


def t_statistic(values: Float64) -> float:
    """Mean over its standard error: beyond +-4 a bias is no accident. 0 for fewer than two values, inf for a
    constant.
    """
    if len(values) < 2:
        return 0.0
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if not spread:
        return float(np.sign(mean) * np.inf) if mean else 0.0
    return mean / (spread / float(np.sqrt(len(values))))


def quantile(values: Float64, q: float) -> float:
    """Quantile, always one of the values (so infinities stay what they are); 0 if there are none.

    That is ``np.quantile(values, q, method="higher")``, which takes ten times as long for a few hundred values.
    """
    if not len(values):
        return 0.0
    at = math.ceil(q * (len(values) - 1))
    return float(np.partition(values, at)[at])


def stats_error(x: Statistics, y: Statistics, width: int) -> Float64:
    """A lower bound of rho from norm, absmax and mean alone, float64 [T].

    | |x| - |y| | <= |x - y| and, by Cauchy-Schwarz, |mean(x) - mean(y)| sqrt(W) <= |x - y|; the largest
    element is taken
    relative to itself. So this is never above what the values would show (up to the largest element's own
    rounding), and the tolerance of rho holds for it.
    """
    norm = ratio(np.abs(x.norm - y.norm), y.norm)
    mean = ratio(np.abs(x.mean - y.mean) * np.sqrt(width), y.norm)
    largest = ratio(np.abs(x.absmax - y.absmax), y.absmax)
    bound: NDArray[np.float64] = np.maximum(np.maximum(norm, mean), largest)
    return bound


def counted_flips(margin: Float64, largest_error: Float64) -> Bool:
    """Which flips of the best id count: those whose margin exceeds twice the row's largest logit error.

    With margin y[a] - y[b] >= 0 for the reference's best a and the other's best b, errors of at most e on
    every logit allow a flip if the margin is at most 2 e. Logits that are within tolerance therefore excuse
    every flip that they can cause; what is left is a top-k that does not follow from its logits.
    """
    return margin > 2 * largest_error * (1 + 1e-6)


@dataclass
class Logits:
    """What is measured of each row of logits, float64 [T]; P and Q are the softmax of train and serve.

    `kl` is KL(P || Q) in nats (absolute accuracy about 1e-6), `tv` the total variation 1/2 sum |P - Q|,
    `largest_error` max |x - y|, `flip` whether the best ids differ, `margin` the reference's logit of its own
    best id minus that of the other side's best id (0 where they agree).
    """

    kl: Float64
    tv: Float64
    largest_error: Float64
    margin: Float64
    flip: Bool

    @classmethod
    def zeros(cls, rows: int) -> Logits:
        """Room for `rows` rows."""
        kl, tv, largest_error, margin = np.zeros((4, rows))
        return cls(kl, tv, largest_error, margin, np.zeros(rows, dtype=np.bool_))

    def put(self, rows: slice | Int, part: Logits) -> None:
        """Take `part` as the rows at `rows`."""
        for name in ("kl", "tv", "largest_error", "margin", "flip"):
            getattr(self, name)[rows] = getattr(part, name)


def logit_metrics(x_TV: Float32, y_TV: Float32, scratch: Sequence[Float32] = ()) -> Logits:
    """Metrics of rows of logits [T, V]; -inf counts as probability zero (where both sides have it).

    Args:
        x_TV: serve.
        y_TV: train.
        scratch: three arrays of the same shape to work in, so that a stream of blocks allocates nothing.
    """
    d_TV, p_TV, q_TV = scratch or [np.empty_like(y_TV) for _ in range(3)]
    rows = np.arange(len(y_TV))
    best_x, best_y = x_TV.argmax(axis=1), y_TV.argmax(axis=1)
    top_x, top_y = x_TV[rows, best_x], y_TV[rows, best_y]
    with np.errstate(invalid="ignore", divide="ignore"):
        np.subtract(x_TV, y_TV, out=d_TV)
        if not np.isfinite(d_TV.sum()):
            d_TV[~np.isfinite(d_TV)] = 0.0
        sum_p, sum_q = _exponentials(y_TV, top_y, p_TV), _exponentials(x_TV, top_x, q_TV)
        mean_d = np.einsum("tv,tv->t", p_TV, d_TV) / sum_p
        kl = (top_x.astype(np.float64) - top_y) + np.log(sum_q / sum_p.astype(np.float64)) - mean_d
        np.multiply(p_TV, (1 / sum_p)[:, None], out=p_TV)
        np.multiply(q_TV, (1 / sum_q)[:, None], out=q_TV)
        np.abs(np.subtract(p_TV, q_TV, out=p_TV), out=p_TV)
        margin = top_y.astype(np.float64) - y_TV[rows, best_x]
    return Logits(
        kl=np.maximum(np.nan_to_num(kl), 0.0),
        tv=0.5 * np.nan_to_num(row_sums(p_TV)).astype(np.float64),
        largest_error=np.maximum(d_TV.max(axis=1), -d_TV.min(axis=1)).astype(np.float64),
        margin=np.nan_to_num(margin),
        flip=best_x != best_y,
    )


def _exponentials(logits: Float32, top: Float32, out: Float32) -> Float32:
    """exp(logits - top) into `out`, and the sum of each row."""
    np.exp(np.subtract(logits, top[:, None], out=out), out=out)
    return row_sums(out)


@dataclass(frozen=True)
class Metrics:
    """What was measured at one site and step. None: not measured (at this level, or for this site).

    Attributes:
        rows: pairs of rows.
        rho_median, rho_p99, rho_max: relative L2 error of a row (an estimate of it if `basis` is ``sketch``, a
            lower bound if ``stats``).
        scale_median: median of <x, y> / <y, y>.
        bias: mean over rows of mean(x - y) over the row's RMS, signed.
        bias_t: its t-statistic.
        channel_median, channel_p99, channel_max: RMS error of a channel over the channel's RMS, over
            channels (over buckets of channels if `basis` is ``sketch``).
        channel_worst: index of the worst channel; None if `basis` is ``sketch``.
        nonfinite_train, nonfinite_serve: elements that are NaN or infinite.
        basis: ``values``, ``sketch`` or ``stats``.
        kl_mean, kl_max, tv_mean, tv_max: divergence of the distributions (logits only).
        flips: rows whose best ids differ (logits only).
        largest_error: largest |x - y| of all elements (logits only).
    """

    rows: int
    rho_median: float
    rho_p99: float
    rho_max: float
    nonfinite_train: int
    nonfinite_serve: int
    basis: str
    scale_median: float | None = None
    bias: float | None = None
    bias_t: float | None = None
    channel_median: float | None = None
    channel_p99: float | None = None
    channel_max: float | None = None
    channel_worst: int | None = None
    kl_mean: float | None = None
    kl_max: float | None = None
    tv_mean: float | None = None
    tv_max: float | None = None
    flips: int | None = None
    largest_error: float | None = None


@dataclass(frozen=True)
class IdMetrics:
    """What was counted at a site of integers.

    Attributes:
        rows: pairs of rows.
        differing: rows that differ and count.
        excused: rows whose best id differs within the margin that the logits' errors allow
            (``topk.draft_id``).
        overlap: mean share of the top-k that both sides name (``topk.*``; as target ids for
            ``topk.target_id``).
    """

    rows: int
    differing: int
    excused: int = 0
    overlap: float | None = None
