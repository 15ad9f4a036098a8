"""Whether numbers lie on the grid of a low-precision format, with a scale for each tensor, row, column or block.

Weights that were quantised and dequantised again keep to k x scale (int8, int4), or to the few values of a small float
(fp8, fp4, nf4). The scale of a group is taken from its largest element, as quantisers do. Whether a group lies on the
grid is then asked of the elements whose neighbours on the grid are far apart against the rounding they were stored
with: off the grid they would be a quarter of a step from it on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Real = NDArray[Any]

#: rows and columns looked at (a multiple of every block)
ROWS, COLUMNS = 32, 2048
#: side of the blocks that large models are quantised by
SQUARE = 128
BLOCKS = (128, 64, 32, 16)
#: mean distance to the grid, in steps; numbers that have nothing to do with it are 0.25 off
ON_GRID = 0.06
#: a group of fewer elements than this would be on any grid
FEWEST = 12


@dataclass(frozen=True)
class Grid:
    """A format that numbers lie on.

    Attributes:
        format: ``int8``, ``int4``, ``fp8 (e4m3)``, ...
        per: what has a scale of its own: ``tensor``, ``row``, ``column`` or ``block of 128``.
        rounds_to: the trained numbers, rounded to the same grid, are these.
    """

    format: str
    per: str
    rounds_to: bool


def _small_float(dtype: Any) -> Real:
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


#: nf4: quantiles of a normal distribution (bitsandbytes, `create_normal_map`)
_NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: values of each format, and the value that the largest element of a group becomes
FORMATS: tuple[tuple[str, Real, tuple[float, ...]], ...] = (
    ("int4", np.arange(-8, 8).astype(np.float64), (7.0, 8.0)),
    ("fp4", np.unique(np.concatenate([-_FP4, _FP4])), (6.0,)),
    ("nf4", _NF4, (1.0,)),
    ("int8", np.arange(-128, 128).astype(np.float64), (127.0, 128.0)),
    ("fp8 (e4m3)", _small_float(ml_dtypes.float8_e4m3fn), (448.0, 240.0)),
    ("fp8 (e5m2)", _small_float(ml_dtypes.float8_e5m2), (57344.0,)),
)


@dataclass(frozen=True)
class Extent:
    """Least and greatest element of each column of a whole matrix, [1, M] each, of which a sample is looked at."""

    lowest: Real
    highest: Real


def grid_of(held: Real, was: Real, unit: float, whole: Extent | None = None) -> Grid | None:
    """The grid that `held` lies on; None if on none of those known here.

    Args:
        held: numbers [N, M], of a matrix or of a vector [1, M].
        was: the trained ones.
        unit: relative rounding they were stored with.
        whole: of the whole matrix, where `held` is a sample of its rows; without it they are all of them.
    """
    rows = np.unique(np.linspace(0, len(held) - 1, min(len(held), ROWS)).astype(np.int64))
    y, x = held[rows, :COLUMNS].astype(np.float64), was[rows, :COLUMNS].astype(np.float64)
    for per, lowest, highest in _groupings(held, whole):
        found = _format(y, x, _taken(lowest, rows), _taken(highest, rows), unit)
        if found is None and per == "tensor":
            # a cast without a scale, or with one that is a power of two, keeps to the format's own values
            for name, values, _ in FORMATS[4:]:
                if (rounds := _lies_on(y, x, np.ones((1, 1)), values, unit)) is not None:
                    found = name, rounds
                    break
        if found is not None:
            return Grid(found[0], per, found[1])
    return None


def _format(y: Real, x: Real, lowest: Real, highest: Real, unit: float) -> tuple[str, bool] | None:
    """The format that y is in, with the range of each element's group, and whether x rounds to it."""
    tiny = np.finfo(np.float64).tiny
    largest = np.maximum(np.maximum(-lowest, highest), tiny)
    for name, values, tops in FORMATS:
        for top in tops if y.size >= 4 * len(values) else ():
            if (found := _lies_on(y, x, largest / top, values, unit)) is not None:
                return name, found
    # a zero point is on the grid, so that the range takes in zero
    lowest = np.minimum(lowest, 0.0)
    span = np.maximum(np.maximum(highest, 0.0) - lowest, tiny)
    for name, count in (("int4 with a zero point", 16), ("int8 with a zero point", 256)):
        values = np.arange(count).astype(np.float64)
        if y.size >= 4 * count and (found := _lies_on(y, x, span / (count - 1), values, unit, lowest)) is not None:
            return name, found
    return None


def _taken(one: Real, rows: NDArray[np.int64]) -> Real:
    """Of a group's figures [N or 1, M or 1], those of the rows and columns looked at."""
    wide: Real = (one[rows] if len(one) > 1 else one)[:, :COLUMNS].astype(np.float64)
    return wide


def _groupings(y: Real, whole: Extent | None) -> Iterator[tuple[str, Real, Real]]:
    """What may have a scale of its own, and the least and the greatest element of each element's group."""
    low = y.min(axis=0, keepdims=True) if whole is None else whole.lowest
    high = y.max(axis=0, keepdims=True) if whole is None else whole.highest
    yield "tensor", low.min(keepdims=True), high.max(keepdims=True)
    if len(y) > 1:
        yield "row", y.min(axis=1, keepdims=True), y.max(axis=1, keepdims=True)
        if whole is not None or len(y) >= FEWEST:
            yield "column", low, high
    for block in BLOCKS:
        if y.shape[1] % block == 0 and y.shape[1] > block:
            blocks = y.reshape(len(y), -1, block)
            lows, highs = (np.repeat(one, block, axis=1) for one in (blocks.min(axis=2), blocks.max(axis=2)))
            yield f"block of {block}", lows, highs


def square_grid_of(held: Real, was: Real, unit: float) -> Grid | None:
    """As `grid_of`, with a scale for each square of `SQUARE` rows and columns; of the first rows of a matrix [N, M]."""
    if len(held) < SQUARE or held.shape[1] % SQUARE:
        return None
    y, x = held[:SQUARE, :COLUMNS].astype(np.float64), was[:SQUARE, :COLUMNS].astype(np.float64)
    squares = y.reshape(SQUARE, -1, SQUARE)
    low, high = (
        np.repeat(one[None, :], SQUARE, axis=1) for one in (squares.min(axis=(0, 2)), squares.max(axis=(0, 2)))
    )
    found = _format(y, x, low, high, unit)
    return None if found is None else Grid(found[0], f"block of {SQUARE} x {SQUARE}", found[1])


def _lies_on(y: Real, x: Real, step: Real, values: Real, unit: float, start: Real | float = 0.0) -> bool | None:
    """Whether y lies on `start` + `values` x step (None if not), and if so whether it is x rounded to it."""
    scaled = (y - start) / step
    near, gap = _nearest(scaled, values)
    # only where the rounding they were stored with is small against a step; the ends of a group are on it by design,
    # and numbers that are small against a step would round to zero
    telling = (np.abs(y / step) * unit < 0.05 * gap) & (scaled < 0.98 * values.max()) & (scaled > 0.98 * values.min())
    telling &= np.abs(y / step) > 0.5 * np.abs(values[values != 0]).min()
    if telling.sum() < max(FEWEST, 0.02 * y.size):
        return None
    off = (np.abs(scaled - near) / gap)[telling]
    if float(off.mean()) > ON_GRID:
        return None
    mine, _ = _nearest((x - start) / step, values)
    return bool((mine == near).mean() > 0.95)


def _nearest(x: Real, values: Real) -> tuple[Real, Real]:
    """The value nearest to each element, and the distance between the two around it."""
    at = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    low, high = values[at - 1], values[at]
    return np.where(x - low < high - x, low, high), high - low
