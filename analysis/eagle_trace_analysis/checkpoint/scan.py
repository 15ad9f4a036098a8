"""One pass over a tensor's bits (not finite, zero, how large), and what a sample of it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.checkpoint.files import StoredTensor, as_float32

#: of each dtype: its unsigned form, the mask without the sign, and the first pattern that is not finite.
#: Ordered by these bits,
#: magnitudes are ordered too, so the largest value and the presence of Inf or NaN are one integer maximum.
BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "F64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    # this format has one NaN and no Inf
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
}
FLOATS: dict[str, Any] = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip

#: with fewer values a lightly trained matrix cannot be told from a fresh one
LEAST_SAMPLE = 1 << 18
#: most rows, and most values, sampled of a matrix
SAMPLE_ROWS, SAMPLE_VALUES = 1024, 1 << 20
#: standard errors a statistic may be from its value at initialisation and still be taken for it
ERRORS = 4.0


@dataclass(frozen=True)
class Scan:
    """What one pass over a floating-point tensor found.

    Attributes:
        largest: the largest finite magnitude.
        rows, zero_rows: of a matrix; a vector counts as one row.
        one_row: a matrix of several rows and columns whose rows are all the same, to the last bit.
    """

    name: str
    elements: int
    nonfinite: int
    largest: float
    rows: int
    zero_rows: int
    one_row: bool = False


def can_scan(tensor: StoredTensor) -> bool:
    """Whether the values of a tensor can be told to be finite or not."""
    return tensor.dtype in BITS and tensor.size > 0


def scan(tensor: StoredTensor) -> Scan:
    """Read a floating-point tensor once, in pieces of whole rows.

    Rows too long for a piece are cut, and then zero rows are not counted.
    """
    unsigned, mask, limit = BITS[tensor.dtype]
    width = tensor.shape[-1] if len(tensor.shape) > 1 else tensor.size
    rows = tensor.size // width if width else 0
    budget = (4 << 20) // np.dtype(unsigned).itemsize
    per_piece = max(budget // max(width, 1), 1) * width
    whole_rows = width <= budget
    nonfinite = zero_rows = top = 0
    one_row, first = whole_rows and rows > 1 and width > 1, None
    buffer = np.empty(min(per_piece if whole_rows else budget, max(tensor.size, 1)), unsigned)
    for piece in tensor.pieces(len(buffer)):
        magnitudes = np.bitwise_and(piece.view(unsigned), unsigned(mask), out=buffer[: len(piece)])
        highest = int(magnitudes.max())
        if one_row:
            bits = piece.view(unsigned)
            first = bits[:width].copy() if first is None else first
            # the first column tells most matrices
            one_row = bool((bits[::width] == first[0]).all() and (bits.reshape(-1, width) == first).all())
        if whole_rows and (magnitudes[::width] == 0).any():
            # only a row that starts with zero can be a zero row
            grid = magnitudes.reshape(-1, width)
            starts = np.flatnonzero(grid[:, 0] == 0)
            zero_rows += int((~grid[starts].any(axis=1)).sum())
        if highest >= limit:
            bad = magnitudes >= unsigned(limit)
            nonfinite += int(bad.sum())
            magnitudes[bad] = 0
            highest = int(magnitudes.max())
        top = max(top, highest)
    return Scan(tensor.name, tensor.size, nonfinite, _value(top, tensor.dtype), rows, zero_rows, one_row)


def _value(bits: int, dtype: str) -> float:
    if dtype == "BF16":
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])
    unsigned = BITS[dtype][0]
    return float(np.array([bits], unsigned).view(FLOATS[dtype])[0])


def looks_initial(tensor: StoredTensor, spread: float) -> str | None:
    """Why the matrix [n, m] cannot be told from a fresh initialisation, or None if it can.

    Two starts are known: normal with the config's initializer_range (transformers), and uniform within
    1/sqrt(fan in)
    (torch.nn.Linear). Independent draws fix the spread, the kurtosis and how much rows differ in norm, each
    up to a
    sampling error; training moves at least one of them by many such errors.
    """
    if len(tensor.shape) != 2 or tensor.size < LEAST_SAMPLE:
        return None
    rows = min(tensor.shape[0], SAMPLE_ROWS, max(SAMPLE_VALUES // tensor.shape[1], 1))
    sample = as_float32(tensor.rows(np.linspace(0, tensor.shape[0] - 1, rows).astype(np.int64))).astype(np.float64)
    if sample.size < LEAST_SAMPLE:
        return None
    deviation = float(sample.std())
    if deviation == 0:
        return None
    kurtosis = float((((sample - sample.mean()) / deviation) ** 4).mean())
    bound = tensor.shape[1] ** -0.5
    for what, expected, tails in (("normal", spread, 3.0), ("uniform", bound / 3**0.5, 1.8)):
        if what == "uniform" and float(np.abs(sample).max()) > bound * (1 + 2**-7):
            continue
        if _near(sample, deviation, kurtosis, expected, tails):
            return (
                f"{what}, standard deviation {deviation:.5f} (a fresh one has {expected:.5f}), "
                f"kurtosis {kurtosis:.2f} ({tails})"
            )
    return None


def _near(sample: NDArray[np.float64], deviation: float, kurtosis: float, expected: float, tails: float) -> bool:
    rows, width = sample.shape
    # rounding to bfloat16 adds less than 1e-5 to these ratios
    spread_error = ((tails - 1) / (4 * sample.size)) ** 0.5 + 1e-5
    if (
        abs(deviation / expected - 1) > ERRORS * spread_error
        or abs(kurtosis - tails) > ERRORS * (24 / sample.size) ** 0.5 + 0.005
    ):
        return False
    powers = (sample**2).mean(axis=1)
    ratio = float(powers.var(ddof=1) / powers.mean() ** 2) * width / (tails - 1) if rows > 1 else 1.0
    return bool(abs(ratio - 1) <= ERRORS * (2 / max(rows - 1, 1)) ** 0.5)
