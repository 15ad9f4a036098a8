"""Running sums over blocks of paired rows: what streams a site of any size through a few numbers per row.

No sum here goes through BLAS: its order of adding changes with the processor and with the number of threads, and a
diff must come out the same to the last bit wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_trace.capture import Array
from eagle_trace_analysis.comparison.metrics import (
    Bool,
    Float32,
    Float64,
    Int,
    Logits,
    Metrics,
    logit_metrics,
    quantile,
    relative_error,
    row_sums,
    scale_factor,
    t_statistic,
)

#: elements of one block. Four float32 buffers of a block (1 MB) stay in a core's L2 cache; smaller ones cost
#: more in calls than they save (measured: 2^14 is a third slower, 2^18 falls out of L2 and is 40 % slower)
BLOCK_ELEMENTS = 1 << 16
#: rows whose energy is below this are summed in float64: their squares would underflow in float32
_SMALL_POWER = 1e-16


@dataclass
class Sums:
    """What is kept of paired rows of one site and step: some numbers per row, two per channel.

    Attributes:
        error, power, cross: |x - y|^2, |y|^2 and <x, y> of each row, float64 [T].
        total: sum of x - y of each row, float64 [T].
        faulty: whether a row has elements that are not finite, bool [T].
        channel_error, channel_power: sums of (x - y)^2 and y^2 of each channel over the rows, float64 [W].
        logits: what only logits have, [T] each; None for other sites.
        nonfinite_train, nonfinite_serve: elements that are not finite.
    """

    error: Float64
    power: Float64
    cross: Float64
    total: Float64
    faulty: Bool
    channel_error: Float64
    channel_power: Float64
    logits: Logits | None = None
    nonfinite_train: int = 0
    nonfinite_serve: int = 0

    @classmethod
    def zeros(cls, rows: int, width: int, *, logits: bool = False) -> Sums:
        """Room for `rows` rows of `width` elements."""
        return cls(
            error=np.zeros(rows),
            power=np.zeros(rows),
            cross=np.zeros(rows),
            total=np.zeros(rows),
            faulty=np.zeros(rows, dtype=np.bool_),
            channel_error=np.zeros(width),
            channel_power=np.zeros(width),
            logits=Logits.zeros(rows) if logits else None,
        )

    def put(self, first: int, part: Sums) -> None:
        """Take the rows of `part` as those from `first` on, and add its channels.

        Floating point sums depend on their order: parts must always be put in the same one.
        """
        rows = slice(first, first + len(part.error))
        for name in ("error", "power", "cross", "total", "faulty"):
            getattr(self, name)[rows] = getattr(part, name)
        if self.logits is not None and part.logits is not None:
            self.logits.put(rows, part.logits)
        self.channel_error += part.channel_error
        self.channel_power += part.channel_power
        self.nonfinite_train += part.nonfinite_train
        self.nonfinite_serve += part.nonfinite_serve

    @property
    def rho(self) -> Float64:
        """Relative L2 error of each row, float64 [T]."""
        return relative_error(self.error, self.power)

    def result(self) -> Metrics:
        """The figures over all rows."""
        rho, channel = self.rho, relative_error(self.channel_error, self.channel_power)
        bias = self.total / np.sqrt(max(1, len(self.channel_error)) * np.where(self.power == 0, 1.0, self.power))
        return Metrics(
            rows=len(rho),
            rho_median=quantile(rho, 0.5),
            rho_p99=quantile(rho, 0.99),
            rho_max=quantile(rho, 1.0),
            nonfinite_train=self.nonfinite_train,
            nonfinite_serve=self.nonfinite_serve,
            basis="values",
            scale_median=quantile(scale_factor(self.cross, self.power), 0.5),
            bias=float(bias.mean()) if len(bias) else 0.0,
            bias_t=t_statistic(bias),
            channel_median=quantile(channel, 0.5),
            channel_p99=quantile(channel, 0.99),
            channel_max=quantile(channel, 1.0),
            channel_worst=int(channel.argmax()) if len(channel) else None,
            **self._logit_figures(),
        )

    def _logit_figures(self) -> dict[str, Any]:
        if self.logits is None or not len(self.logits.kl):
            return {}
        return {
            "kl_mean": float(self.logits.kl.mean()),
            "kl_max": float(self.logits.kl.max()),
            "tv_mean": float(self.logits.tv.mean()),
            "tv_max": float(self.logits.tv.max()),
            "flips": int(self.logits.flip.sum()),
            "largest_error": float(self.logits.largest_error.max()),
        }


@dataclass
class _Buffers:
    """Room for one block: x, y, their difference, products."""

    x: Float32
    y: Float32
    d: Float32
    product: Float32

    @classmethod
    def of(cls, rows: int, width: int) -> _Buffers:
        return cls(*(np.empty((rows, width), dtype=np.float32) for _ in range(4)))


@dataclass
class Accumulator:
    """Adds blocks of paired rows of one site and step to `sums`.

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
    sums: Sums = field(init=False)
    _buffers: _Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.sums = Sums.zeros(self.rows, self.width, logits=self.logits)
        self.block_rows = max(1, BLOCK_ELEMENTS // max(1, self.width))
        self._buffers = _Buffers.of(min(self.block_rows, max(1, self.rows)), self.width)
        self._scratch = [np.empty_like(self._buffers.d) for _ in range(3 if self.logits else 0)]

    def add(self, x_TW: Array, y_TW: Array, at: Int | None = None) -> None:
        """Add rows of x (serve) and y (train), [T, W] each, in any dtypes a trace holds.

        Args:
            x_TW: serve.
            y_TW: train.
            at: which rows of `sums` they are, int64 [T]; the next ones if None.
        """
        if at is None:
            at = np.arange(self.filled, self.filled + len(y_TW))
        self.filled += len(y_TW)
        for start in range(0, len(y_TW), self.block_rows):
            block = slice(start, start + self.block_rows)
            # overflow and NaN are found from the sums and dealt with; denormals do not matter
            with np.errstate(over="ignore", invalid="ignore"):
                self._add_block(x_TW[block], y_TW[block], at[block])

    def _add_block(self, x_in: Array, y_in: Array, rows: Int) -> None:
        count, sums = len(y_in), self.sums
        x, y = _widen(x_in, self._buffers.x), _widen(y_in, self._buffers.y)
        d, product = self._buffers.d[:count], self._buffers.product[:count]
        np.subtract(x, y, out=d)
        error, error_W = _squares(d, product)
        power, power_W = _squares(y, product)
        cross, total = row_sums(np.multiply(d, y, out=product)), row_sums(d)
        odd = ~(error + power < np.inf) | (power < _SMALL_POWER)
        if odd.any():
            x, y = x.copy(), y.copy()
            self._add_odd(x, y, np.flatnonzero(odd), rows)
            d[odd] = 0.0
            square_y = np.where(odd[:, None], np.float32(0), y)
            _, error_W = _squares(d, product)
            _, power_W = _squares(square_y, product)
        usual = ~odd
        at = rows[usual]
        sums.error[at] = error[usual]
        sums.power[at] = power[usual]
        sums.cross[at] = cross[usual] + power[usual].astype(np.float64)
        sums.total[at] = total[usual]
        sums.channel_error += error_W
        sums.channel_power += power_W
        if sums.logits is not None:
            sums.logits.put(rows, logit_metrics(x, y, [one[:count] for one in self._scratch]))

    def _add_odd(self, x: Float32, y: Float32, at: Int, rows: Int) -> None:
        """Rows that are not finite, or cannot be squared in float32: in float64, cleaned in place."""
        sums = self.sums
        xs, ys = x[at].astype(np.float64), y[at].astype(np.float64)
        bad_x, bad_y = ~np.isfinite(xs), ~np.isfinite(ys)
        masked = (xs == ys) & bad_x
        sums.nonfinite_serve += int((bad_x & ~masked).sum())
        sums.nonfinite_train += int((bad_y & ~masked).sum())
        sums.faulty[rows[at]] = ((bad_x | bad_y) & ~masked).any(axis=1)
        taken = bad_x | bad_y
        xs[taken] = ys[taken] = 0.0
        d = xs - ys
        sums.error[rows[at]] = np.einsum("tw,tw->t", d, d)
        sums.power[rows[at]] = np.einsum("tw,tw->t", ys, ys)
        sums.cross[rows[at]] = np.einsum("tw,tw->t", xs, ys)
        sums.total[rows[at]] = d.sum(axis=1)
        sums.channel_error += np.einsum("tw,tw->w", d, d)
        sums.channel_power += np.einsum("tw,tw->w", ys, ys)
        # for logits: what was taken out has probability zero on both sides
        low = np.float32(-np.inf) if self.logits else np.float32(0)
        x[at] = np.where(taken, low, x[at])
        y[at] = np.where(taken, low, y[at])


def _squares(a: Float32, product: Float32) -> tuple[Float32, Float32]:
    """Sums of squares of each row and of each channel; `product` is room for the squares."""
    np.multiply(a, a, out=product)
    return row_sums(product), product.sum(axis=0)


def _widen(block: Array, buffer: Float32) -> Float32:
    """`block` as float32: itself, or copied into `buffer`."""
    if block.dtype == np.float32:
        return block.view(np.float32)
    out = buffer[: len(block)]
    np.copyto(out, block, casting="unsafe")
    return out
