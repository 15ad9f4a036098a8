"""Faults under the rounding: what of a step's error is systematic.

Rounding is random and a fault is not. A down projection scaled by 1.005 moves its elements by about one rounding of
bfloat16, so no size tells it from a healthy one; over some hundred rows and channels it stands out all the same. So the
error of a step, recorded minus recomputed from recorded inputs (`eagle_trace_analysis.replay.replay`), is looked at in
two ways. Let d_tc be the error and y_tc the recomputed value of row t and channel c, both over the RMS of channel c.

**The coherent part.** Rows that are alike have alike errors if the error is a function of the row: with other weights,
another scale, an offset, another rotation. Roundings of two rows have nothing to do with each other. With K_ts the
cosine between the rows y_t and y_s and G_ts = <d_t, d_s> / (|y_t| |y_s|), summed over pairs of different rows::

    coherent^2 = sum K_ts G_ts / sum K_ts^2          z = sum K_ts G_ts / sqrt(2 sum K_ts^2 G_ts^2)

`coherent` is the RMS relative error that follows the rows (for a common scale, d = a y, it is a), and z is the
sum over its standard deviation if the sign of each row's error were a coin's. Equal rows count once and pairs of rows
nearer than `NEAR` not at all: the same number is rounded the same way twice.

With K = 1 the same sums give `offset`, what is added to all rows alike: where rows are centred around zero, nothing
else shows it.

**The slope of a channel**, b_c = <d_c, y_c> / <y_c, y_c>, finds one wrong channel among hundreds, which the sum above
averages away. Its standard error is the larger of two: of the residuals, weighted by leverage (HC3, MacKinnon and White
1985), so that a slope which stands on one huge row is not believed; and of the roundings alone. The common `scale` is
the smaller of the median slope over channels and over rows, with the standard errors of the two medians.

**What is judged.** Both the size and its significance: z > `SIGNIFICANT` and `coherent` or `offset` beyond the limit,
or one channel's slope beyond `CHANNEL` u and `SIGNIFICANT` standard errors. u is 2^-8 (bfloat16), 2^-11 (float16), and
32 x 2^-24 in float32, where the order of a sum shows in the same way. And only where it is beyond `FACTOR` times that
of the training side's own replay of the step (the control).

The limit of `coherent` is what the step's roundings amount to if all of them are coherent, 0.425 u sqrt(R): the
rounding of an elementwise step may well follow its inputs. A norm's weight of 1 - 2^-8 takes off one last digit of
bfloat16 from each element, never less; what is added to a stream and is below half a digit of it is lost each time;
cosines and sines are rounded once for all rows. In a matrix product such things drown in the sum: there it is
`PRODUCT` u.

**What healthy pairs show** (SGLang and speculators on CPUs, SmolLM2-135M with a draft, three steps; in u), beside one
projection scaled by 1.005 on the demo draft in bfloat16:

===========================  ========  =======  =======  =====================  ===========
largest `coherent`           bfloat16  float16  float32  limit                  scale 1.005
===========================  ========  =======  =======  =====================  ===========
matrix products                  0.03     0.04     0.07  0.30                          1.46
norms, sums, the activation      0.05     0.24     0.02  0.60 (R 2), 0.74 (R 3)
rotations                        0.15     0.13     0.07  0.74
===========================  ========  =======  =======  =====================  ===========

No channel had a significant slope; |scale - 1| was at most 0.08 u. The float16 norms are of the kind described above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.comparison.tolerance import FACTOR, ONE_ROUNDING, UNIT

Real = NDArray[Any]
Float64 = NDArray[np.float64]

#: rows looked at, and how few distinct ones say nothing
MOST_ROWS, FEWEST_ROWS = 96, 12
#: pairs of rows with a larger cosine are too much alike to be rounded independently
NEAR = 0.99
SIGNIFICANT = 8.0
#: limit of a product's coherent part, in units of u
PRODUCT = 0.3
#: of one channel's slope: a single rounding is never off by more than one u
CHANNEL = 2.0
#: a float32 host sums in float32, and how it does is no accident: its limits are so many times as wide
FLOAT32 = 32.0
#: an error of so many times the channel's own size, as of memory that nobody wrote, is not looked into: its squares
#: are beyond float32, and its size says enough
HUGE = 1e6
#: channels below this share of the largest one's power are dead
_DEAD = 1e-12
#: standard error of a median over that of a mean, and of a sample's spread from its median absolute deviation
_MEDIAN, _MAD = 1.2533, 1.4826


@dataclass(frozen=True)
class Limits:
    """What is allowed of the systematic part of a step's error, relative.

    Attributes:
        noise: RMS error of the step's roundings.
        coherent: of the part that follows the rows.
        channel: of the slope of one channel.
    """

    noise: float
    coherent: float
    channel: float

    @classmethod
    def of(cls, unit: float, roundings: float, *, product: bool = False, position: float = 0.0) -> Limits:
        """Limits of a step.

        Args:
            unit: u of the dtype recorded.
            roundings: of the step, on one side.
            product: whether the step is a matrix product.
            position: of a rotation, the largest position: hosts hold frequencies in float32, so that an angle is off by
                as many times its unit. 0 for any other step.
        """
        wide = unit * (FLOAT32 if unit <= UNIT["float32"] else 1.0)
        noise = ONE_ROUNDING * math.sqrt(roundings)
        coherent = (PRODUCT if product else noise) * wide + UNIT["float32"] * position
        return cls(noise * unit, coherent, CHANNEL * wide)


@dataclass(frozen=True)
class Systematic:
    """The systematic part of one step's error. Errors are relative.

    Attributes:
        rows: distinct rows it stands on.
        coherent, coherent_z: RMS error that follows the rows (negative: rows that are alike have unlike errors),
            and its significance.
        scale, scale_error: common factor of all channels and rows, and its standard error.
        channel: of the channels whose slope is significant and beyond the limit, the one with the largest; None if
            there is none.
        channel_scale, channel_scale_error: factor of that channel; of no channel, 1 and 0.
        offset, offset_z: RMS error that is the same in all rows, and its significance.
        limits: what may be.
    """

    rows: int
    coherent: float
    coherent_z: float
    scale: float
    scale_error: float
    channel: int | None
    channel_scale: float
    channel_scale_error: float
    offset: float
    offset_z: float
    limits: Limits

    def excess(self, control: Systematic | None = None) -> float:
        """What is significant, over what is allowed beside a healthy `control`: beyond 1 it is a fault, 0 is nothing.

        Without a control, over the limits alone.
        """
        coherent, channel = self.limits.coherent, self.limits.channel
        if control is not None:
            coherent = max(coherent, FACTOR * abs(control.coherent))
            channel = max(channel, FACTOR * abs(control.channel_scale - 1))
        offset = self.limits.coherent if control is None else max(self.limits.coherent, FACTOR * abs(control.offset))
        return max(
            self.coherent / coherent if self.coherent_z > SIGNIFICANT else 0.0,
            self.offset / offset if self.offset_z > SIGNIFICANT else 0.0,
            abs(self.channel_scale - 1) / channel,
        )

    def figures(self) -> dict[str, float | int]:
        """The figures by name; `channel` only where there is one."""
        left_out = () if self.channel is not None else ("channel", "channel_scale", "channel_scale_error")
        return {name: value for name, value in vars(self).items() if name not in ("rows", "limits", *left_out)}

    def words(self) -> str:
        """What kind of fault it is, in figures."""
        if abs(self.scale - 1) > max(self.coherent / 2, SIGNIFICANT * self.scale_error):
            return f"scale {_with_error(self.scale, self.scale_error)}"
        if self.channel is not None and abs(self.channel_scale - 1) > max(self.limits.channel, FACTOR * self.coherent):
            factor = _with_error(self.channel_scale, self.channel_scale_error)
            return f"channel {self.channel} has scale {factor}"
        if self.offset_z > max(SIGNIFICANT, self.coherent_z):
            return f"an offset of {_share(self.offset)} is added"
        return f"an error of {_share(self.coherent)} follows the inputs"


def systematic(recorded_TC: Real, expected_TC: Real, channels: NDArray[np.int64], limits: Limits) -> Systematic | None:
    """The systematic part of recorded - expected; None on too few distinct rows, where nothing is known to differ, or
    where the error is `HUGE`.

    Args:
        recorded_TC: rows of a step as recorded, [T, C].
        expected_TC: the same recomputed in one dtype higher.
        channels: which channels they are, int64 [C].
        limits: of the step.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _systematic(recorded_TC, expected_TC, channels, limits)


def _systematic(recorded_TC: Real, expected_TC: Real, channels: NDArray[np.int64], limits: Limits) -> Systematic | None:
    rows = _distinct(expected_TC)
    y, x = expected_TC[rows], recorded_TC[rows]
    power = np.einsum("tc,tc->c", y, y)
    finite = np.isfinite(power) & np.isfinite(x.sum(axis=0))
    live = np.flatnonzero(finite & (power > _DEAD * power.max(initial=0, where=finite)))
    if len(rows) < FEWEST_ROWS or not live.size:
        return None
    if live.size < y.shape[1]:
        x, y, power = x[:, live], y[:, live], power[live]
    # in units of the channel's RMS; float32 holds what is left
    rms = np.sqrt(power / len(rows))
    d = ((x - y) / rms).astype(np.float32)
    if not float(np.abs(d).max()) < HUGE:
        return None
    y = (y / rms).astype(np.float32)
    norm = np.sqrt(np.maximum(np.einsum("tc,tc->t", y, y), np.float32(1e-30)))
    coherent, offset = _coherent(d, y, norm)
    product = d * y
    slope_c = np.einsum("tc->c", product) / len(rows)
    slope_t = np.einsum("tc->t", product) / (norm * norm)
    at, error = _channel(d, y, slope_c, limits)
    scale, scale_error = _scale(slope_c, slope_t, limits.noise)
    return Systematic(
        rows=len(rows),
        coherent=coherent[0],
        coherent_z=coherent[1],
        scale=1 + scale,
        scale_error=scale_error,
        channel=None if at is None else int(channels[live[at]]),
        channel_scale=1.0 if at is None else 1 + float(slope_c[at]),
        channel_scale_error=error,
        offset=offset[0],
        offset_z=offset[1],
        limits=limits,
    )


def _share(value: float) -> str:
    return f"{100 * value:.2f} %" if value > 1e-3 else f"{value:.1e}"


def _with_error(value: float, error: float) -> str:
    """1.0050 +- 0.0002, to the first digit of the error."""
    digits = min(9, max(4, math.ceil(-math.log10(error)))) if error > 0 else 6
    return f"{value:.{digits}f} +- {error:.{digits}f}"


def _distinct(rows_TC: Real) -> NDArray[np.int64]:
    """Rows that differ from each other, the first of each kind, at most `MOST_ROWS` evenly spaced ones, ascending."""
    # a few channels tell rows apart
    few = np.ascontiguousarray(rows_TC[:, :: max(1, rows_TC.shape[1] // 8)])
    _, first = np.unique(few.view(np.dtype((np.void, few.dtype.itemsize * few.shape[1]))), return_index=True)
    first.sort()
    if len(first) > MOST_ROWS:
        first = first[np.linspace(0, len(first) - 1, MOST_ROWS).astype(np.int64)]
    return first


def _coherent(d_TC: Real, y_TC: Real, norm_T: Real) -> tuple[tuple[float, float], tuple[float, float]]:
    """The coherent part of errors and the constant one, each with its significance; `norm_T` are the rows' |y|."""
    both = norm_T[:, None] * norm_T
    alike, errors = y_TC @ y_TC.T / both, d_TC @ d_TC.T / both
    near = np.abs(alike) > NEAR  # each row with itself, too
    alike[near] = errors[near] = 0
    return _over_pairs(alike, errors), _over_pairs((~near).astype(np.float32), errors)


def _over_pairs(weight_TT: Real, errors_TT: Real) -> tuple[float, float]:
    """RMS of the part of errors that goes as `weight`, with the sign of its square, and its significance."""
    product = weight_TT * errors_TT
    total, square, weight = float(np.einsum("ts->", product)), float(np.einsum("ts,ts->", product, product)), float(
        np.einsum("ts,ts->", weight_TT, weight_TT))  # fmt: skip
    if not weight or not square:
        return 0.0, 0.0
    share = total / weight
    return math.copysign(math.sqrt(abs(share)), share), total / math.sqrt(2 * square)


def _channel(d_TC: Real, y_TC: Real, slope_C: Real, limits: Limits) -> tuple[int | None, float]:
    """The channel with the largest slope beyond the limit that is significant, and its standard error; or (None, 0)."""
    beyond = np.flatnonzero(np.abs(slope_C) > limits.channel)
    if not beyond.size:
        return None, 0.0
    d, y = (one[:, beyond].astype(np.float64) for one in (d_TC, y_TC))
    square = y * y
    power = square.sum(axis=0)
    slope = (d * y).sum(axis=0) / power
    rest = np.maximum(1 - square / power, 1e-9)
    residual = (d - slope * y) / rest
    variance = np.maximum((residual**2 * square).sum(axis=0), limits.noise**2 * (square * square).sum(axis=0))
    error = np.sqrt(variance) / power
    size = np.where(np.abs(slope) > SIGNIFICANT * error, np.abs(slope), 0.0)
    largest = int(size.argmax())
    return (int(beyond[largest]), float(error[largest])) if size[largest] else (None, 0.0)


def _scale(slope_C: Real, slope_T: Real, noise: float) -> tuple[float, float]:
    """What is common to the slopes of channels and of rows, and its standard error."""
    medians, variance = [], noise * noise / (len(slope_C) * len(slope_T))
    for slopes in (slope_C, slope_T):
        middle = _median(slopes)
        spread = _MAD * _median(np.abs(slopes - middle))
        medians.append(middle)
        variance += spread * spread / len(slopes)
    agreed = min(medians, key=abs) if medians[0] * medians[1] > 0 else 0.0
    return agreed, _MEDIAN * math.sqrt(variance)


def _median(values: Real) -> float:
    """The middle one: NumPy's median takes ten times as long for a few hundred values."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])
