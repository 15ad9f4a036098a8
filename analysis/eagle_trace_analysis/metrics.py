"""Numbers about two sets of rows: x (serve) against y (train, the reference). Pure functions and one running
sum.

Conventions, everywhere: ``0 / 0 = 0`` (nothing there, nothing wrong) and ``x / 0 = inf`` (something where
    nothing
should be). Elements that are not finite are counted and then taken out of x and y alike, so that one NaN does
not hide what the rest of the row says; the same infinity on both sides (a masked logit) is not a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Array, Statistics

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

#: elements of one block. Four float32 buffers of a block (1 MB) stay in a core's L2 cache; smaller ones cost
#: more in calls than they save (measured: 2^14 is a third slower, 2^18 falls out of L2 and is 40 % slower)
BLOCK_ELEMENTS = 1 << 16
#: rows whose energy is below this are summed in float64: their squares would underflow in float32
_SMALL_POWER = 1e-16


def ratio(numerator: Float64, denominator: Float64) -> Float64:
    """numerator / denominator for numbers >= 0, with 0/0 = 0 and x/0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numerator == 0, 0.0, numerator / denominator)


def relative_error(error: Float64, power: Float64) -> Float64:
    """sqrt(error / power): rho of a row (sums over its elements), or a channel's error over its RMS (sums
    over rows).
    """
    return np.sqrt(ratio(error, power))


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
    """Quantile, always one of the values (so infinities stay what they are); 0 if there are none."""
    return float(np.quantile(values, q, method="higher")) if len(values) else 0.0


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
        mean_d = np.vecdot(p_TV, d_TV) / sum_p
        kl = (top_x.astype(np.float64) - top_y) + np.log(sum_q / sum_p.astype(np.float64)) - mean_d
        np.multiply(p_TV, (1 / sum_p)[:, None], out=p_TV)
        np.multiply(q_TV, (1 / sum_q)[:, None], out=q_TV)
        np.abs(np.subtract(p_TV, q_TV, out=p_TV), out=p_TV)
        margin = top_y.astype(np.float64) - y_TV[rows, best_x]
    return Logits(
        kl=np.maximum(np.nan_to_num(kl), 0.0),
        tv=0.5 * np.nan_to_num(p_TV @ np.ones(p_TV.shape[1], dtype=np.float32)).astype(np.float64),
        largest_error=np.maximum(d_TV.max(axis=1), -d_TV.min(axis=1)).astype(np.float64),
        margin=np.nan_to_num(margin),
        flip=best_x != best_y,
    )


def _exponentials(logits: Float32, top: Float32, out: Float32) -> Float32:
    """exp(logits - top) into `out`, and the sum of each row."""
    np.exp(np.subtract(logits, top[:, None], out=out), out=out)
    total: Float32 = out @ np.ones(out.shape[1], dtype=np.float32)
    return total


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


@dataclass
class _Buffers:
    """Room for one block: x, y, their difference, squares."""

    x: Float32
    y: Float32
    d: Float32
    square: Float32

    @classmethod
    def of(cls, rows: int, width: int) -> _Buffers:
        return cls(*(np.empty((rows, width), dtype=np.float32) for _ in range(4)))


@dataclass
class Accumulator:
    """Sums over blocks of paired rows of one site and step; holds a few numbers a row and two a channel.

    Blocks are float32 in cache; what is added up over blocks is float64. No float64 copy of a block is made
    but for rows that are not finite or too small to square.

    Args:
        width: elements of a row, W.
        rows: how many rows will be added.
        logits: measure what only logits have.
    """

    width: int
    rows: int
    logits: bool = False
    filled: int = 0
    nonfinite_train: int = 0
    nonfinite_serve: int = 0
    _buffers: _Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.block_rows = max(1, BLOCK_ELEMENTS // max(1, self.width))
        self._buffers = _Buffers.of(min(self.block_rows, max(1, self.rows)), self.width)
        self._scratch = [np.empty_like(self._buffers.d) for _ in range(3 if self.logits else 0)]
        self._ones_W = np.ones(self.width, dtype=np.float32)
        self._ones_B = np.ones(self.block_rows, dtype=np.float32)
        self.error_T = np.zeros(self.rows)
        self.power_T = np.zeros(self.rows)
        self.cross_T = np.zeros(self.rows)
        self.sum_T = np.zeros(self.rows)
        self.faulty_T = np.zeros(self.rows, dtype=np.bool_)
        self.error_W = np.zeros(self.width)
        self.power_W = np.zeros(self.width)
        self.logit_rows: list[Logits] = []

    def add(self, x_TW: Array, y_TW: Array) -> None:
        """Add rows of x (serve) and y (train), [T, W] each, in any dtypes a trace holds."""
        for start in range(0, len(y_TW), self.block_rows):
            stop = start + self.block_rows
            # overflow and NaN are found from the sums and dealt with; denormals do not matter
            with np.errstate(over="ignore", invalid="ignore"):
                self._add_block(x_TW[start:stop], y_TW[start:stop])

    def _add_block(self, x_in: Array, y_in: Array) -> None:
        count = len(y_in)
        rows = slice(self.filled, self.filled + count)
        self.filled += count
        x, y = _widen(x_in, self._buffers.x), _widen(y_in, self._buffers.y)
        d, square = self._buffers.d[:count], self._buffers.square[:count]
        np.subtract(x, y, out=d)
        error, error_W = self._squares(d, square)
        power, power_W = self._squares(y, square)
        cross, total = np.vecdot(d, y), d @ self._ones_W
        odd = ~(error + power < np.inf) | (power < _SMALL_POWER)
        if odd.any():
            x, y = x.copy(), y.copy()
            self._add_odd(x, y, np.flatnonzero(odd), rows.start)
            d[odd] = 0.0
            square_y = np.where(odd[:, None], np.float32(0), y)
            _, error_W = self._squares(d, square)
            _, power_W = self._squares(square_y, square)
        usual = ~odd
        self.error_T[rows][usual] = error[usual]
        self.power_T[rows][usual] = power[usual]
        self.cross_T[rows][usual] = cross[usual] + power[usual].astype(np.float64)
        self.sum_T[rows][usual] = total[usual]
        self.error_W += error_W
        self.power_W += power_W
        if self.logits:
            self.logit_rows.append(logit_metrics(x, y, [one[:count] for one in self._scratch]))

    def _squares(self, a: Float32, square: Float32) -> tuple[Float32, Float32]:
        """Sums of squares of each row and of each channel, by matrix products (faster than einsum)."""
        np.multiply(a, a, out=square)
        return square @ self._ones_W, self._ones_B[: len(a)] @ square

    def _add_odd(self, x: Float32, y: Float32, at: Int, first: int) -> None:
        """Rows that are not finite, or cannot be squared in float32: in float64, cleaned in place."""
        xs, ys = x[at].astype(np.float64), y[at].astype(np.float64)
        bad_x, bad_y = ~np.isfinite(xs), ~np.isfinite(ys)
        masked = (xs == ys) & bad_x
        self.nonfinite_serve += int((bad_x & ~masked).sum())
        self.nonfinite_train += int((bad_y & ~masked).sum())
        rows = first + at
        self.faulty_T[rows] = ((bad_x | bad_y) & ~masked).any(axis=1)
        taken = bad_x | bad_y
        xs[taken] = ys[taken] = 0.0
        d = xs - ys
        self.error_T[rows] = np.vecdot(d, d)
        self.power_T[rows] = np.vecdot(ys, ys)
        self.cross_T[rows] = np.vecdot(xs, ys)
        self.sum_T[rows] = d.sum(axis=1)
        self.error_W += np.einsum("tw,tw->w", d, d)
        self.power_W += np.einsum("tw,tw->w", ys, ys)
        # for logits: what was taken out has probability zero on both sides
        low = np.float32(-np.inf) if self.logits else np.float32(0)
        x[at] = np.where(taken, low, x[at])
        y[at] = np.where(taken, low, y[at])

    @property
    def rho(self) -> Float64:
        """Relative L2 error of each row added, float64 [rows]."""
        return relative_error(self.error_T, self.power_T)

    def result(self) -> Metrics:
        """The figures over all rows added."""
        rho, channel = self.rho, relative_error(self.error_W, self.power_W)
        bias = self.sum_T / np.sqrt(max(1, self.width) * np.where(self.power_T == 0, 1.0, self.power_T))
        return Metrics(
            rows=self.filled,
            rho_median=quantile(rho, 0.5),
            rho_p99=quantile(rho, 0.99),
            rho_max=quantile(rho, 1.0),
            nonfinite_train=self.nonfinite_train,
            nonfinite_serve=self.nonfinite_serve,
            basis="values",
            scale_median=quantile(scale_factor(self.cross_T, self.power_T), 0.5),
            bias=float(bias.mean()) if len(bias) else 0.0,
            bias_t=t_statistic(bias),
            channel_median=quantile(channel, 0.5),
            channel_p99=quantile(channel, 0.99),
            channel_max=quantile(channel, 1.0),
            channel_worst=int(channel.argmax()) if len(channel) else None,
            **self._logit_figures(),
        )

    def _logit_figures(self) -> dict[str, Any]:
        if not self.logit_rows:
            return {}
        kl = np.concatenate([block.kl for block in self.logit_rows])
        tv = np.concatenate([block.tv for block in self.logit_rows])
        return {
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "tv_mean": float(tv.mean()),
            "tv_max": float(tv.max()),
            "flips": int(sum(block.flip.sum() for block in self.logit_rows)),
            "largest_error": float(self.largest_errors().max()),
        }

    def largest_errors(self) -> Float64:
        """Largest |x - y| of each row of logits, float64 [rows]; empty if `logits` is off."""
        blocks = [block.largest_error for block in self.logit_rows]
        return np.concatenate(blocks) if blocks else np.zeros(0)


def _widen(block: Array, buffer: Float32) -> Float32:
    """`block` as float32: itself, or copied into `buffer`."""
    if block.dtype == np.float32:
        return block.view(np.float32)
    out = buffer[: len(block)]
    np.copyto(out, block, casting="unsafe")
    return out
