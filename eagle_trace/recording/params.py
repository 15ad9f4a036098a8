"""Parameters as a host holds them: the rows of params.parquet."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Shard, to_float32
from eagle_trace.recording.arrays import to_array


def parameter_row(
    name: str,
    canonical_name: str,
    tensor: Any,
    *,
    in_checkpoint: bool | None,
    shard: Shard | None = None,
    shard_axis: int = 0,
) -> dict[str, Any]:
    """A row of params.parquet for a parameter as the host holds it (torch tensor or numpy array, any device).

    The digest is BLAKE2b of the exact bytes, so equal parameters have equal digests on both sides. `shard` says which
    part of the parameter along `shard_axis` a rank holds, if not all of it: shape, digest and norm are then the part's.
    """
    array = np.ascontiguousarray(tensor if isinstance(tensor, np.ndarray) else to_array(tensor, copy=False))
    norm, nonfinite = _norm(array.reshape(-1))
    return {
        "name": name,
        "canonical_name": canonical_name,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "digest": hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=8).hexdigest(),
        "norm": norm,
        "nonfinite": nonfinite,
        "in_checkpoint": in_checkpoint,
        "shard_axis": None if shard is None else shard_axis,
        "shard_index": None if shard is None else shard.index,
        "shard_count": None if shard is None else shard.count,
    }


def _norm(flat: Array, block: int = 1 << 16) -> tuple[float, int]:
    """Norm over the finite elements, summed in float64 over blocks, and the count of the others."""
    square, nonfinite = 0.0, 0
    for start in range(0, len(flat), block):
        x = flat[start : start + block]
        wide = x.astype(np.float64) if x.dtype.kind in "iub" else to_float32(x).astype(np.float64)
        # einsum, not a dot product: that wakes BLAS's threads, which then spin on the host's cores
        part = float(np.einsum("i,i->", wide, wide))
        if not np.isfinite(part):
            finite = np.isfinite(wide)
            nonfinite += int((~finite).sum())
            part = float(np.einsum("i,i->", wide[finite], wide[finite]))
        square += part
    return float(np.sqrt(square)), nonfinite
