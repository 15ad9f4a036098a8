"""Weights of a checkpoint for recomputing single steps: read when asked for, some rows at a time, by
speculators' names.

A matrix product is checked on a sample of its outputs, so of a large matrix only the rows that make those
outputs are read (`CHANNELS` of them); a head of 163,840 x 7168 costs 15 MB, not 4.7 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES
from eagle_trace_analysis.checkpoint.files import Checkpoint, StoredTensor, as_float32
from eagle_trace_analysis.engines import SGLANG, Engine

Int = NDArray[np.int64]
Real = NDArray[Any]

#: outputs of a matrix product that are recomputed
CHANNELS = 512


def sampled(width: int, limit: int = CHANNELS) -> Int:
    """At most `limit` evenly spaced indices below `width`, int64, ascending."""
    return np.unique(np.linspace(0, width - 1, min(width, limit)).astype(np.int64))


@dataclass(frozen=True)
class Weights:
    """Parameters of one checkpoint as a host holds them: rounded to the dtype it computes in.

    Attributes:
        tensors: stored tensors by speculators' names.
        dtype: on-disk name of the dtype the host computes in.
        instead: arrays that stand in for stored tensors.
        edits: what is done to rows of a tensor after they were read (columns zeroed, moved, ...).
    """

    tensors: Mapping[str, StoredTensor]
    dtype: str
    instead: Mapping[str, Real] = field(default_factory=dict)
    edits: Mapping[str, Callable[[Real], Real]] = field(default_factory=dict)
    _cache: dict[Any, Real] = field(default_factory=dict, compare=False, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.instead or name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor (KeyError if it is not there)."""
        if name in self.instead:
            return tuple(self.instead[name].shape)
        return self.tensors[name].shape

    def whole(self, name: str) -> Real:
        """A whole tensor, for vectors and small tables."""
        if name in self.instead:
            return self.instead[name]
        if name not in self._cache:
            self._cache[name] = self._as_held(self.tensors[name].read())
        return self._cache[name]

    def rows(self, name: str, index: Int) -> Real:
        """Some rows of a matrix, [len(index), columns]."""
        found = self._rows(name, index)
        return self.edits[name](found) if name in self.edits else found

    def _rows(self, name: str, index: Int) -> Real:
        if name in self.instead:
            return self.instead[name][index]
        key = (name, index.tobytes())
        if key not in self._cache:
            stored = self.tensors[name]
            # small matrices in one read, large ones row by row
            if stored.nbytes <= 4 << 20:
                self._cache[key] = self.whole(name)[index]
            else:
                self._cache[key] = self._as_held(stored.rows(index))
        return self._cache[key]

    def replaced(self, arrays: Mapping[str, Real]) -> Weights:
        """The same with arrays in place of some tensors."""
        return replace(self, instead={**self.instead, **arrays})

    def borrowing(self, name: str, tensor: StoredTensor) -> Weights:
        """The same with another stored tensor under `name`."""
        return Weights({**self.tensors, name: tensor}, self.dtype, self.instead, self.edits)

    def edited(self, name: str, edit: Callable[[Real], Real]) -> Weights:
        """The same with `edit` done to the rows of one tensor."""
        return replace(self, edits={**self.edits, name: edit})

    def _as_held(self, array: NDArray[Any]) -> Real:
        if array.dtype.kind in "iub":
            return array.astype(np.int64)
        wide = as_float32(array)
        if self.dtype in ("bfloat16", "float16"):
            wide = as_float32(wide.astype(DTYPES[self.dtype]))
        return wide


def weights_of(
    checkpoint: Checkpoint, dtype: str, embedding: StoredTensor | None = None, engine: Engine = SGLANG
) -> Weights:
    """Weights of a draft checkpoint; `embedding` (the target's) stands in if the draft ships none."""
    tensors = {engine.canonical_name(tensor.name): tensor for tensor in checkpoint.tensors.values()}
    if embedding is not None:
        tensors.setdefault("embed_tokens.weight", embedding)
    return Weights(tensors, dtype)
