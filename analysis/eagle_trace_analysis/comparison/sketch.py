"""Comparing two traces by the sketches of their rows (`eagle_trace.sketch`), and what that allows to say.

With S the projection, x the serve row and y the train row of width W > 64:

- `rho` is estimated by |Sx - Sy| / |y|, with the exact norm below. For a given difference |Sx - Sy|^2 has the mean
  |x - y|^2 and a variance of at most 2/64 of its square, so one row's rho has a standard error of sqrt(2/64)/2 = 8.8 %.
  S is the same for all rows: rows that differ in different directions err apart, and their median errs less; rows that
  all differ in the same direction err alike.
- The scale <x, y> / <y, y> follows from |x|, |y| and rho: (|x|^2/|y|^2 + 1 - rho^2) / 2. The exact norms leave an error
  of 0.09 rho^2, where <Sx, Sy> / <Sy, Sy> would be off by 0.18 rho.
- `channel_*` are taken over buckets instead of channels: RMS error of a bucket over its RMS. One huge channel is in one
  bucket of the 64, so it does not hide what is wrong with the others.
- `bias` is exact: the statistics hold each row's mean.

A row of at most 64 elements is its own sketch: nothing is estimated there.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Statistics
from eagle_trace.reader import SiteData, SketchReader
from eagle_trace.sketch import BUCKETS, buckets, stored_dtype
from eagle_trace_analysis.comparison.compare import CHUNK_BYTES, Compared, Part, SiteReader
from eagle_trace_analysis.comparison.metrics import (
    ANY_NUMBERS,
    Metrics,
    quantile,
    relative_error,
    scale_factor,
    t_statistic,
)
from eagle_trace_analysis.comparison.sums import Accumulator, Sums
from eagle_trace_analysis.comparison.tolerance import FACTOR, SCALE, Tolerance, analytic_floor
from eagle_trace_analysis.comparison.worst import statistics_of

Float64 = NDArray[np.float64]
Int = NDArray[np.int64]

#: standard error of one row's rho, relative to it
ROW_ERROR = sqrt(2 / BUCKETS) / 2
WORDS = f"row errors are estimates, +-{ROW_ERROR:.0%} (1 sigma) a row"

#: how often a site whose rows all differ by exactly what is allowed may be called diverged
FALSE_ALARM = 1e-4
#: median over 64 buckets of a bucket's error over its RMS, relative to the channels': see `widened`
BUCKET_SPREAD = 2.35


def has_sketch(data: SiteData) -> bool:
    """Whether rows can be compared by their sketches: as recorded, or made from the values."""
    return data.has_sketch or data.has_values


@ANY_NUMBERS
def compare_sketches(part: Part) -> dict[int, Compared]:
    """Compare a whole site by the sketches of its rows; both sides hold sketches or values, of one width."""
    left, right = part.train.data, part.serve.data
    y, x = (statistics_of(half.data, half.index) for half in (part.train, part.serve))
    before, after = (SiteReader([SketchReader(one) for one in data]) for data in (left, right))
    width, found = left[0].width, {}
    for step in np.unique(part.step):
        at = np.flatnonzero(part.step == step)
        ys, xs = y.take(at), x.take(at)
        total = _accumulate(before, after, width, part.train.index[at], part.serve.index[at])
        rho = estimated_rho(total, ys)
        faulty = (xs.nonfinite > 0) | (ys.nonfinite > 0)
        worst = int(faulty.argmax()) if faulty.any() else int(rho.argmax())
        metrics, row = sketch_metrics(total, rho, xs, ys, width), at[[worst]]
        found[int(step)] = Compared(metrics, int(row[0]), at, rho, statistics=(y.take(row), x.take(row)))
    return found


def estimated_rho(total: Sums, y: Statistics) -> Float64:
    """|Sx - Sy| / |y| of the rows added, float64 [rows]."""
    return relative_error(total.error, y.norm**2)


def _accumulate(y: SiteReader, x: SiteReader, width: int, train: Int, serve: Int) -> Sums:
    total = Accumulator(buckets(width), len(train))
    rows = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start in range(0, len(train), rows):
        part = slice(start, start + rows)
        total.add(x.take(serve[part]), y.take(train[part]))
    return total.sums


def sketch_metrics(total: Sums, rho: Float64, x: Statistics, y: Statistics, width: int) -> Metrics:
    """The figures of one site and step.

    Args:
        total: of the sketches of all rows.
        rho: estimated of each row.
        x, y: statistics of the serve and the train rows.
        width: elements of a row.
    """
    channel = relative_error(total.channel_error, total.channel_power)
    power = y.norm**2
    # <x, y> = (|x|^2 + |y|^2 - |x - y|^2) / 2
    cross = (x.norm**2 + power - total.error) / 2
    bias = (x.mean - y.mean) * sqrt(width) / np.where(power == 0, 1.0, y.norm)
    return Metrics(
        rows=len(rho),
        rho_median=quantile(rho, 0.5),
        rho_p99=quantile(rho, 0.99),
        rho_max=quantile(rho, 1.0),
        nonfinite_train=int(y.nonfinite.sum()),
        nonfinite_serve=int(x.nonfinite.sum()),
        basis="sketch",
        scale_median=quantile(scale_factor(cross, power), 0.5),
        bias=float(bias.mean()),
        bias_t=t_statistic(bias),
        channel_median=quantile(channel, 0.5),
        channel_p99=quantile(channel, 0.99),
        channel_max=quantile(channel, 1.0),
    )


def widened(tolerance: Tolerance, width: int, rows: int) -> Tolerance:
    """`tolerance` as it holds for metrics from sketches of rows of `width` elements, `rows` pairs of them.

    Three things are added to what is allowed of the rows themselves, so that a pair that agrees by its values agrees
    by its sketches:

    - *Storage.* Scaling and storing rounds once: in float16 for 16-bit rows, else in float32, where the sums of W/64
      terms round on the way too (half as often as there are terms, partial sums being half as large).
    - *The estimate.* |Sx - Sy|^2 / |x - y|^2 spreads like chi-square with 64 degrees of freedom over 64. `rho_median`
      is allowed its 1 - 1e-4 quantile (rho: 1.34 times), `rho_max` the quantile for the largest of `rows` rows (1.49
      times for 1000), the scale what that error of rho^2 makes of it.
    - *Buckets.* A bucket's error relative to its RMS is a mean over its channels, weighted by their power, so it lies
      between the channels' error and the rows', and the larger of the two floors counts. Channels that are constant
      over rows may cancel in the bucket's RMS, but not their errors: if all are constant, the ratio is 1 over the
      absolute value of a standard normal number, whose median over 64 buckets is below 2.35 (1.48 + 4 sigma).
    """
    if width <= BUCKETS:
        roundings, estimate, largest, spread = 1.0, 1.0, 1.0, 1.0
    else:
        roundings = 1.0 + width / (2 * BUCKETS)
        estimate, largest, spread = _quantile(1), _quantile(rows), BUCKET_SPREAD
    stored = stored_dtype(tolerance.dtype)
    storage = FACTOR * analytic_floor(1.0 if stored == "float16" else roundings, stored)
    rho = sqrt(tolerance.allowed["rho_median"] ** 2 + storage**2)
    channel = max(tolerance.allowed["channel_median"], tolerance.allowed["rho_median"])
    allowed = {
        "rho_median": estimate * rho,
        "rho_max": largest * sqrt(tolerance.allowed["rho_max"] ** 2 + storage**2),
        "channel_median": spread * sqrt(channel**2 + storage**2),
    }
    if SCALE in tolerance.allowed:
        allowed[SCALE] = sqrt(tolerance.allowed[SCALE] ** 2 + storage**2) + (estimate**2 - 1) / 2 * rho**2
    return replace(tolerance, allowed=allowed)


def _quantile(rows: int) -> float:
    """sqrt of the (1 - FALSE_ALARM / rows) quantile of chi-square with 64 degrees of freedom, over 64
    (Wilson and Hilferty 1931).
    """
    normal = NormalDist().inv_cdf(1 - FALSE_ALARM / max(1, rows))
    variance = 2 / (9 * BUCKETS)
    return float((1 - variance + normal * sqrt(variance)) ** 1.5)
