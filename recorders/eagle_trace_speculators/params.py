"""Parameters of the draft as speculators loaded them; its names are the canonical ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from eagle_trace.capture import Array
from eagle_trace.recorder import to_array

BLOCK_ELEMENTS = 1 << 22
#: training's own targets, no part of the draft forward and never in a checkpoint
NOT_DRAFT = ("verifier_lm_head.", "verifier_norm.")


def draft_tensors(model: Any) -> dict[str, Any]:
    """Parameters and vocabulary maps of an `Eagle3DraftModel` by name, without training's own targets."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(NOT_DRAFT)}


def loaded_params(model: Any, stored: Set[str]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet.

    Args:
        model: the loaded draft.
        stored: names of the tensors in the checkpoint.
    """
    for name, tensor in draft_tensors(model).items():
        array = to_array(tensor)
        norm, nonfinite = _norm(array.reshape(-1))
        yield {
            "name": name,
            "canonical_name": name,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "digest": hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()[:16],
            "norm": norm,
            "nonfinite": nonfinite,
            "in_checkpoint": name in stored,
        }


def _norm(flat: Array) -> tuple[float, int]:
    """Float64 norm over the finite elements, and the count of the others."""
    square, nonfinite = 0.0, 0
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        block = flat[start : start + BLOCK_ELEMENTS].astype(np.float64)
        finite = np.isfinite(block)
        nonfinite += int((~finite).sum())
        block[~finite] = 0.0
        square += float(block @ block)
    return float(np.sqrt(square)), nonfinite
