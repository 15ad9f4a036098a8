"""Captures: rows of tensors and the keys that say which row is which.

A **capture** is one tensor row at (prompt, root, step, site). Rows arrive in batches, as the host computes them, so a
batch of keys (`Rows`) is shared by all sites of one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Array = NDArray[Any]

#: dtypes whose exact bytes a trace can hold, by the name used on disk
DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}

LEVELS = ("shapes", "stats", "sketch", "values")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equally wide parts of a row, cut along its last axis."""

    index: int
    count: int


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(array: Array) -> str:
    """The on-disk name of an array's dtype; raises TypeError for a dtype no trace can hold."""
    try:
        return _NAMES[array.dtype]
    except KeyError:
        raise TypeError(f"a trace holds {', '.join(DTYPES)}, not {array.dtype}") from None


@dataclass(frozen=True)
class Rows:
    """Keys of a batch of rows, column by column; every column has the same length T.

    Attributes:
        prompt_id: which prompt, int32 [T].
        root: index p of the target feature g_p the row starts from, int32 [T].
        step: 0 for the extend row, s for the s-th draft step, int32 [T].
        round: verify round the row was computed in (0 = prefill), int32 [T].
        call_id: forward call the row was computed in, int32 [T].
        token_id: token fed, int32 [T].
        position: rotary position, int32 [T].
        path: target ids fed at steps 1..step below the root, int32 [T, S] padded with -1 (S = largest step).
        own_path: False where the host lets the row attend to keys of another branch of the draft tree, bool [T].
    """

    prompt_id: Int32
    root: Int32
    step: Int32
    round: Int32
    call_id: Int32
    token_id: Int32
    position: Int32
    path: Int32
    own_path: NDArray[np.bool_]

    def __post_init__(self) -> None:
        count = len(self.root)
        if any(len(getattr(self, name)) != count for name in _COLUMNS):
            lengths = {name: len(getattr(self, name)) for name in _COLUMNS}
            raise ValueError(f"columns of rows differ in length: {lengths}")
        if self.path.ndim != 2:
            raise ValueError(f"path must be [T, S], not {self.path.shape}")

    def __len__(self) -> int:
        return len(self.root)

    @classmethod
    def build(
        cls,
        *,
        prompt_id: Sequence[int] | Int32,
        root: Sequence[int] | Int32,
        step: Sequence[int] | Int32,
        token_id: Sequence[int] | Int32,
        position: Sequence[int] | Int32,
        call_id: int,
        round: Sequence[int] | Int32 | int = 0,
        path: Sequence[Sequence[int]] | Int32 | None = None,
        own_path: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> Rows:
        """Rows from plain sequences; `round` may be one number, `path` ragged (or None when every step is 0)."""
        count = len(root)

        def column(values: Sequence[int] | Int32 | int) -> Int32:
            array = np.asarray(values, dtype=np.int32)
            return np.full(count, array, dtype=np.int32) if array.ndim == 0 else array

        if not isinstance(path, np.ndarray):
            path = _pad_paths(path or [()] * count)
        return cls(
            prompt_id=column(prompt_id),
            root=column(root),
            step=column(step),
            round=column(round),
            call_id=column(call_id),
            token_id=column(token_id),
            position=column(position),
            path=path,
            own_path=np.ones(count, dtype=np.bool_) if own_path is None else np.asarray(own_path, dtype=np.bool_),
        )

    def take(self, index: NDArray[np.intp]) -> Rows:
        """The rows at `index`, in that order."""
        return Rows(*(getattr(self, name)[index] for name in _COLUMNS))

    def same(self, other: Rows) -> bool:
        """Whether all columns are equal, row by row."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _COLUMNS)
        return self is other or all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)

    def paths(self) -> list[tuple[int, ...]]:
        """`path` without its padding, one tuple a row."""
        return [tuple(row[:step].tolist()) for row, step in zip(self.path, self.step, strict=True)]

    @staticmethod
    def concatenate(batches: Sequence[Rows]) -> Rows:
        """One `Rows` from several; paths are padded to the longest."""
        if len(batches) == 1:
            return batches[0]
        width = max((batch.path.shape[1] for batch in batches), default=0)
        columns = {
            name: np.concatenate([getattr(batch, name) for batch in batches]) for name in _COLUMNS if name != "path"
        }
        return Rows(path=np.concatenate([_widen(batch.path, width) for batch in batches]), **columns)


_COLUMNS = tuple(field.name for field in fields(Rows))


def _pad_paths(paths: Sequence[Sequence[int]]) -> Int32:
    width = max((len(path) for path in paths), default=0)
    padded = np.full((len(paths), width), -1, dtype=np.int32)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded


def _widen(path: Int32, width: int) -> Int32:
    if path.shape[1] == width:
        return path
    wide = np.full((len(path), width), -1, dtype=np.int32)
    wide[:, : path.shape[1]] = path
    return wide


def drawn_channels(width: int, count: int = 64) -> NDArray[np.int64]:
    """The channels of layers.parquet of a trace that does not name them, ascending: earlier versions drew them.

    From a stream that NumPy does not promise to keep, so that nothing draws from it any more.
    """
    if width <= count:
        return np.arange(width, dtype=np.int64)
    return np.sort(np.random.default_rng(0).permutation(width)[:count]).astype(np.int64)


def to_float32(values: Array) -> NDArray[np.float32]:
    """`values` widened to float32 (float64 is narrowed); bfloat16 by shifting its bits, which is exact and fast."""
    if values.dtype == np.float32:
        return values.view(np.float32)
    if values.dtype == DTYPES["bfloat16"]:
        return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


@dataclass(frozen=True)
class Statistics:
    """What `stats` keeps of each row: float64 norm, largest absolute value, mean, and the count of NaN and Inf.

    `norm`, `absmax` and `mean` are over the finite elements, so that one NaN does not hide the rest.
    """

    norm: NDArray[np.float64]
    absmax: NDArray[np.float64]
    mean: NDArray[np.float64]
    nonfinite: Int32

    def take(self, index: NDArray[np.integer]) -> Statistics:
        """Those of the rows at `index`, in that order."""
        return Statistics(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def row_statistics(values: Array) -> Statistics:
    """Statistics of each row of `values` [T, W], any dtype of `DTYPES`; sums of squares in float32 (see `_squares`)."""
    x_TW: NDArray[np.floating] = values if values.dtype == np.float64 else to_float32(values)
    width = x_TW.shape[1]
    square = _squares(x_TW)
    nonfinite = np.zeros(len(x_TW), dtype=np.int32)
    bad = np.flatnonzero(~np.isfinite(square))
    if bad.size:
        # a row can also overflow in the sum of squares alone: redo the suspects in float64
        rows = x_TW[bad].astype(np.float64)
        finite = np.isfinite(rows)
        nonfinite[bad] = width - finite.sum(axis=1)
        rows[~finite] = 0.0
        x_TW = x_TW.astype(np.float64)
        x_TW[bad] = rows
        square[bad] = np.einsum("tw,tw->t", rows, rows)
    if not width:
        zeros = np.zeros(len(x_TW))
        return Statistics(zeros, zeros, zeros, nonfinite)
    absmax = np.maximum(x_TW.max(axis=1), -x_TW.min(axis=1)).astype(np.float64)
    # sums, not products with a vector of ones: those wake BLAS's threads, which then spin on the host's cores
    mean = x_TW.sum(axis=1, dtype=np.float64) / width
    return Statistics(np.sqrt(square), absmax, mean, nonfinite)


def _squares(x_TW: NDArray[np.floating], run: int = 128) -> NDArray[np.float64]:
    """Sum of squares of each row: float32 over runs of 128 elements, float64 over the runs.

    One float32 sum over a wide row is off by up to 1e-6, more than what float32 traces may differ by.
    """
    whole = x_TW.shape[1] // run * run
    runs = x_TW[:, :whole].reshape(len(x_TW), whole // run, run)
    rest = x_TW[:, whole:]
    total: NDArray[np.float64] = np.einsum("tkb,tkb->tk", runs, runs).sum(axis=1, dtype=np.float64)
    total += np.einsum("tw,tw->t", rest, rest)
    return total
