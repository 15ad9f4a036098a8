"""Rows of a site on their way into the trace: as they come at level ``values``, reduced below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import pyarrow as pa

from eagle_trace.capture import DTYPES, Array, Rows, Shard, dtype_name, row_statistics
from eagle_trace.sketch import Reduced, buckets, reduce_rows, stored_dtype

if TYPE_CHECKING:
    from eagle_trace.parts import PartStream

#: bytes of rows that are reduced together: many small batches would cost more in calls than in arithmetic
REDUCE_BYTES = 512 << 10
#: bytes of a row's keys and statistics, roughly, before compression
KEY_BYTES = 64
STATISTICS = ("norm", "absmax", "mean", "nonfinite")
#: columns of exact bytes
BLOBS = ("sketch", "values")

#: how many results a memo keeps: of one forward some sites have all rows, others those of some requests or modes
_MEMOS = 4

Kept = tuple[Rows, "Array | Reduced"]
Made = TypeVar("Made")


class Memo(Generic[Made]):
    """`make` of batches of rows, made once for all sites that have the very same batches."""

    def __init__(self, make: Callable[[Sequence[Rows]], Made]) -> None:
        self._make = make
        # with the batches, so that no other can come to have their ids
        self._made: dict[tuple[int, ...], tuple[Sequence[Rows], Made]] = {}

    def __call__(self, batches: Sequence[Rows]) -> Made:
        key = tuple(map(id, batches))
        if key not in self._made:
            self._made[key] = batches, self._make(batches)
            if len(self._made) > _MEMOS:
                del self._made[next(iter(self._made))]
        return self._made[key][1]

    def forget(self) -> None:
        """Hold no rows any more."""
        self._made.clear()


def kind_of(values: Array | Reduced) -> tuple[str, int]:
    """On-disk dtype name and width of rows."""
    return (values.dtype, values.width) if isinstance(values, Reduced) else (dtype_name(values), values.shape[1])


def row_bytes(dtype: str, width: int, level: str, shard: Shard | None = None) -> int:
    """What a row of an on-disk dtype and a width will take in a trace of a level, roughly.

    Raises:
        TypeError: no trace can hold that dtype.
    """
    if dtype not in DTYPES:
        raise TypeError(f"a trace holds {', '.join(DTYPES)}, not {dtype}")
    if level == "values":
        return width * DTYPES[dtype].itemsize
    whole = width * (shard.count if shard else 1)
    return KEY_BYTES + (DTYPES[stored_dtype(dtype)].itemsize * buckets(whole) if level == "sketch" else 0)


def kept_bytes(values: Array | Reduced, level: str, shard: Shard | None = None) -> int:
    """What rows will take in a trace of a level, roughly."""
    return values.nbytes if level == "values" else len(values) * row_bytes(*kind_of(values), level, shard)


class SiteStream:
    """Rows of one site, dtype and width on their way to the site's parts.

    At level ``values`` they go there as they come; below it they are collected until it is worth reducing them.

    Args:
        level: of the trace.
        shard: which part of the site's rows they are, if not all.
        join: `Rows.concatenate`.
        parts: takes (rows, what is kept of them) and their size in bytes.
    """

    def __init__(
        self, level: str, shard: Shard | None, join: Callable[[Sequence[Rows]], Rows], parts: PartStream
    ) -> None:
        self._level = level
        self._shard = shard
        self._join = join
        self._parts = parts
        self._rows: list[Rows] = []
        self._values: list[Array] = []
        self._bytes = 0

    def add(self, rows: Rows, values: Array | Reduced) -> None:
        """Take rows, in order."""
        if self._level == "values":
            self._parts.add((rows, values), values.nbytes)
        elif isinstance(values, Reduced):
            self.drain()
            self._parts.add((rows, values), kept_bytes(values, self._level, self._shard))
        else:
            self._rows.append(rows)
            self._values.append(values)
            self._bytes += values.nbytes
            if self._bytes >= REDUCE_BYTES:
                self.drain()

    def drain(self) -> None:
        """Reduce what was collected, and give it to the parts."""
        if self._rows:
            rows, values = self._join(self._rows), _joined(self._values)
            self._rows, self._values, self._bytes = [], [], 0
            reduced = reduce_rows(values, dtype_name(values), sketched=self._level == "sketch", shard=self._shard)
            self._parts.add((rows, reduced), kept_bytes(reduced, self._level, self._shard))


def site_table(schema: pa.Schema, keys: Memo[dict[str, pa.Array]], items: Sequence[Kept]) -> pa.Table:
    """Rows of one site as a table: keys, statistics, and their sketch or values as `schema` has it."""
    arrays = [kept for _, kept in items if not isinstance(kept, Reduced)]
    blob: Array | None
    if arrays:
        blob = _joined(arrays)
        statistics = row_statistics(blob)
    else:
        reduced = Reduced.concatenate([kept for _, kept in items if isinstance(kept, Reduced)])
        statistics, blob = reduced.statistics, reduced.sketch
    columns = keys([rows for rows, _ in items]) | {name: pa.array(getattr(statistics, name)) for name in STATISTICS}
    if blob is not None:
        name = next(name for name in BLOBS if name in schema.names)
        data = [None, pa.py_buffer(np.ascontiguousarray(blob).view(np.uint8))]
        columns[name] = pa.FixedSizeBinaryArray.from_buffers(schema.field(name).type, len(blob), data)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _joined(arrays: Sequence[Array]) -> Array:
    return np.ascontiguousarray(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
