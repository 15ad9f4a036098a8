"""In which dtype a server keeps keys and values, and what a number becomes when it is kept so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.tolerance import UNIT

Real = NDArray[Any]

#: what servers call a dtype, where that is not its own name
NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
#: dtypes that keys and values are rounded to one by one
_ROUNDED = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


@dataclass(frozen=True)
class Kept:
    """How one trace's host keeps the keys and values of a model.

    Attributes:
        dtype: of the cache, in the manifest's words; that of the computing where nothing is cached (a training).
        computed: the dtype that the host computes in.
    """

    dtype: str
    computed: str

    @property
    def known(self) -> bool:
        """Whether it is known here what a number becomes in the cache."""
        return self.name in _ROUNDED or self.name in UNIT

    @property
    def name(self) -> str:
        """The dtype's own name."""
        return NAMES.get(self.dtype, self.dtype)

    @property
    def unit(self) -> float:
        """The largest relative error of one rounding to the cache's dtype: half a unit in the last place."""
        return 2.0 ** -(int(ml_dtypes.finfo(_ROUNDED[self.name]).nmant) + 1)

    @property
    def rounds(self) -> bool:
        """Whether keys and values lose digits in the cache."""
        return self.name in _ROUNDED and self.unit > UNIT.get(self.computed, 0.0)

    def rounded(self, x: Real, scale: float = 1.0) -> Real:
        """Numbers as they are read from the cache: x / scale, to nearest even, times scale; the largest one at most."""
        dtype = _ROUNDED[self.name]
        most = float(ml_dtypes.finfo(dtype).max)
        held = np.clip(x.astype(np.float32) / np.float32(scale), -most, most).astype(dtype)
        return (held.astype(np.float32) * np.float32(scale)).astype(x.dtype)

    def words(self) -> str:
        """The two dtypes, in words."""
        return self.dtype + (f" and computes in {self.computed}" if self.dtype != self.computed else "")


def kept(trace: Trace, *, draft: bool) -> Kept | None:
    """How the host of a trace keeps keys and values of its target or its draft; None for a server that does not say."""
    settings, computed = trace.manifest.settings, trace.manifest.dtype
    if trace.side == "train":
        return Kept(computed, computed)
    held = settings.get("kv_cache_dtype")
    if draft:
        held = settings.get("draft_kv_cache_dtype", held)
    if not isinstance(held, str) or not held:
        return None
    return Kept(computed if held == "auto" else held, computed)
