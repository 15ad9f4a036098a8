"""What the server holds of each parameter, held against the trained one: by digest where there is one.

A trace keeps no tensors, only a digest and a norm of each. The trained checkpoint, cast to the dtype the server loads
in, has a digest too, so equality is exact also where training computes in another dtype; and a tensor of the deployed
folder is taken for what was loaded only if its digest says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES
from eagle_trace_analysis.checkpoint.files import StoredTensor, as_float32
from eagle_trace_analysis.comparison.params import same

#: a tensor is read and hashed for its digest up to this size
MOST_BYTES = 256 << 20
#: rows compared of tensors that have no digest
ROWS = 256


@dataclass(frozen=True)
class Apart:
    """A parameter whose numbers as loaded are not the trained ones.

    Attributes:
        name: speculators' name.
        trained, served: its rows of params.parquet.
        was: the trained tensor, if its checkpoint is there.
        held: the tensor that the server loaded, if the deployed folder still has it.
    """

    name: str
    trained: Mapping[str, Any]
    served: Mapping[str, Any]
    was: StoredTensor | None = None
    held: StoredTensor | None = None


def cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored numbers in another dtype, as a host casts them on loading."""
    with np.errstate(over="ignore"):
        return values.astype(np.float64) if dtype == "float64" else as_float32(values).astype(DTYPES[dtype])


def digest_of(array: NDArray[Any]) -> str:
    """Digest that `eagle_trace.recording.params.parameter_row` gives an array."""
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


def digest_as(tensor: StoredTensor, dtype: str) -> str | None:
    """Digest that `eagle_trace.recording.params.parameter_row` gives a stored tensor cast to `dtype` (numpy's name).

    None for a tensor that is too large to read for this, or of a dtype that is not known.
    """
    if tensor.nbytes > MOST_BYTES or not tensor.is_float or dtype not in DTYPES:
        return None
    whole = hashlib.blake2b(digest_size=8)
    for piece in tensor.pieces():
        whole.update(np.ascontiguousarray(cast(piece, dtype)).view(np.uint8).data)
    return whole.hexdigest()


def equal_as_loaded(
    served: Mapping[str, Any], trained: Mapping[str, Any], was: StoredTensor | None, held: StoredTensor | None
) -> bool:
    """Whether a parameter as loaded holds the trained numbers, rounded to the server's dtype at most.

    Args:
        served, trained: its rows of params.parquet.
        was: the trained tensor.
        held: that of the deployed folder.
    """
    if not same(served, trained):
        return False
    if was is None or not was.is_float or not was.shape or list(was.shape) != list(served["shape"]):
        return True
    if not served["digest"]:
        # put together from shards: alike in norm, which moved rows are too
        return held is None or not is_loaded(held, served) or _rows_equal(was, held)
    if served["dtype"] == trained["dtype"] or not is_loaded(was, trained):
        return True
    # alike in norm, which a quantised tensor is too
    digest = digest_as(was, str(served["dtype"]))
    return digest is None or bool(digest == served["digest"])


def _rows_equal(was: StoredTensor, held: StoredTensor) -> bool:
    """Whether some rows of two tensors of one shape are equal, once both are rounded to the coarser dtype."""
    rows = np.unique(np.linspace(0, was.shape[0] - 1, min(was.shape[0], ROWS)).astype(np.int64))
    one, two = was.rows(rows), held.rows(rows)
    coarser = min((one.dtype, two.dtype), key=lambda dtype: ml_dtypes.finfo(dtype).nmant)
    return bool(
        np.array_equal(as_float32(as_float32(one).astype(coarser)), as_float32(as_float32(two).astype(coarser)))
    )


def is_loaded(tensor: StoredTensor | None, served: Mapping[str, Any]) -> bool:
    """Whether a tensor of the deployed folder is what the server holds: by digest, else by shape and norm."""
    if tensor is None or not tensor.is_float or list(tensor.shape) != list(served["shape"]):
        return False
    if served["digest"] and (digest := digest_as(tensor, str(served["dtype"]))) is not None:
        return bool(digest == served["digest"])
    square = sum(float(np.square(as_float32(piece).astype(np.float64)).sum()) for piece in tensor.pieces())
    return bool(abs(square**0.5 - served["norm"]) <= 4e-3 * served["norm"])


def apart(
    trained: Mapping[str, Any],
    served: Mapping[str, Any],
    was: Mapping[str, StoredTensor],
    held: Mapping[str, StoredTensor],
) -> list[Apart]:
    """Parameters that both hosts hold with other numbers.

    Args:
        trained, served: rows of params.parquet by speculators' names.
        was, held: tensors of the trained and of the deployed checkpoint, by speculators' names.
    """
    found = []
    for name, row in trained.items():
        theirs, mine, loaded = served.get(name), was.get(name), held.get(name)
        if theirs is not None and not equal_as_loaded(theirs, row, mine, loaded):
            # a training that goes on has left its checkpoint behind
            mine = mine if is_loaded(mine, row) else None
            found.append(Apart(name, row, theirs, mine, loaded if is_loaded(loaded, theirs) else None))
    return found
