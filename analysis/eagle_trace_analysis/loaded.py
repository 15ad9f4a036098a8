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

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES
from eagle_trace_analysis.checkpoint.files import StoredTensor, as_float32
from eagle_trace_analysis.params import same

#: a tensor is read and hashed for its digest up to this size
MOST_BYTES = 256 << 20


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
    """Digest that `eagle_trace.recorder.parameter_row` gives an array."""
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


def digest_as(tensor: StoredTensor, dtype: str) -> str | None:
    """Digest that `eagle_trace.recorder.parameter_row` gives a stored tensor cast to `dtype` (numpy's name of it); None
    for a tensor that is too large to read for this, or of a dtype that is not known.
    """
    if tensor.nbytes > MOST_BYTES or not tensor.is_float or dtype not in DTYPES:
        return None
    whole = hashlib.blake2b(digest_size=8)
    for piece in tensor.pieces():
        whole.update(np.ascontiguousarray(cast(piece, dtype)).view(np.uint8).data)
    return whole.hexdigest()


def equal_as_loaded(served: Mapping[str, Any], trained: Mapping[str, Any], was: StoredTensor | None) -> bool:
    """Whether a parameter as loaded holds the trained numbers, rounded to the server's dtype at most."""
    if not same(served, trained):
        return False
    if served["dtype"] == trained["dtype"] or not served["digest"] or was is None:
        return True
    # alike in norm, which a quantised tensor is too: its digest tells
    if list(was.shape) != list(served["shape"]) or (digest := digest_as(was, str(served["dtype"]))) is None:
        return True
    return bool(digest == served["digest"])


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
        theirs = served.get(name)
        if theirs is not None and not equal_as_loaded(theirs, row, was.get(name)):
            loaded = held.get(name)
            found.append(Apart(name, row, theirs, was.get(name), loaded if is_loaded(loaded, theirs) else None))
    return found
