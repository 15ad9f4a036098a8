"""Rounding floors: how far the serving dtype alone takes each site from a reference one dtype higher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Array

Float64 = NDArray[np.float64]

#: the dtype one higher, whose own rounding is small beside that of the dtype measured
REFERENCE = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
BLOCK_ELEMENTS = 1 << 20


@dataclass
class _Site:
    """Running sums of one site at one step."""

    rho: list[Float64] = field(default_factory=list)
    error: Float64 | None = None
    power: Float64 | None = None


class Floors:
    """Gathers |low - reference| over rows and channels, block by block; holds one float64 a row and two a
    channel.

    Rows that are not finite in either dtype are left out.

    Args:
        dtype: the serving dtype.
        reference: the dtype of the reference.
    """

    def __init__(self, dtype: str, reference: str) -> None:
        self.dtype = dtype
        self.reference = reference
        self._sites: dict[tuple[str, int], _Site] = defaultdict(_Site)

    def add(self, site: str, step: int, low: Array, reference: Array) -> None:
        """Take the same rows of a site in both dtypes, [T, W] each."""
        kept = self._sites[site, step]
        rows = max(1, BLOCK_ELEMENTS // max(1, low.shape[1]))
        for start in range(0, len(low), rows):
            y_TW = reference[start : start + rows].astype(np.float64)
            d_TW = low[start : start + rows].astype(np.float64) - y_TW
            # a row with NaN or Inf says nothing about rounding, and would spoil every channel's sum
            finite = np.isfinite(d_TW).all(axis=1)
            y_TW, d_TW = y_TW[finite], d_TW[finite]
            error_W, power_W = np.einsum("tw,tw->w", d_TW, d_TW), np.einsum("tw,tw->w", y_TW, y_TW)
            error_T, power_T = np.einsum("tw,tw->t", d_TW, d_TW), np.einsum("tw,tw->t", y_TW, y_TW)
            kept.rho.append(_relative(error_T, power_T))
            kept.error = error_W if kept.error is None else kept.error + error_W
            kept.power = power_W if kept.power is None else kept.power + power_W

    def records(self) -> Iterator[dict[str, Any]]:
        """Rows of floors.parquet, in the order the sites were first seen."""
        for (site, step), kept in self._sites.items():
            rho = np.concatenate([np.empty(0), *kept.rho])
            if not len(rho) or kept.error is None or kept.power is None:
                continue
            channel = _relative(kept.error, kept.power)
            yield {
                "site": site,
                "step": step,
                "dtype": self.dtype,
                "reference": self.reference,
                "rows": len(rho),
                **_summary("rho", rho),
                **_summary("channel", channel),
            }


def _relative(error: Float64, power: Float64) -> Float64:
    """sqrt(error / power); 0 where nothing differs, also beside a reference of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, np.sqrt(error / power))


def _summary(name: str, values: Float64) -> dict[str, float]:
    median, p99 = np.quantile(values, [0.5, 0.99], method="higher")
    return {f"{name}_median": float(median), f"{name}_p99": float(p99), f"{name}_max": float(values.max())}
