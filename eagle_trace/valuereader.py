"""Random access to the rows of one site: their exact values, or their sketches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, Array, row_statistics
from eagle_trace.errors import TraceError
from eagle_trace.partfile import PartFile
from eagle_trace.sitedata import SiteData, read_statistics
from eagle_trace.sketch import buckets, sketch, stored_dtype, unscale

CACHE_BYTES = 256 << 20
OPEN_FILES = 8


class ValueReader:
    """Random access to the values of one site, with a bounded cache of row groups.

    Row groups are decoded once as long as the working set fits `cache_bytes`.
    """

    def __init__(self, data: SiteData, cache_bytes: int = CACHE_BYTES) -> None:
        if not data.has_values:
            raise TraceError(f"site {data.site!r} was recorded at a level without values: record with --level values")
        self._open(data, "values", data.dtype, data.width, cache_bytes)
        self._shards += [ValueReader(shard, cache_bytes // len(data.shards)) for shard in data.shards]

    def _open(self, data: SiteData, column: str, dtype: str, width: int, cache_bytes: int) -> None:
        self.data = data
        self._column = column
        self.width = width
        self._dtype = DTYPES[dtype]
        self._shards: list[ValueReader] = []
        self._starts = np.array([group.start for group in data.groups], dtype=np.int64)
        self._cache: OrderedDict[int, Array] = OrderedDict()
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes
        self._files: OrderedDict[PartFile, pq.ParquetFile] = OrderedDict()

    def take(self, index: NDArray[np.integer]) -> Array:
        """Rows at `index` (any order), exact dtype, [len(index), width]; a view where they lie side by side."""
        if not len(index):
            return np.empty((0, self.width), dtype=self._dtype)
        if self._shards:
            pairs = zip(self._shards, self.data.orders, strict=True)
            return np.concatenate(
                [reader.take(index if order is None else order[index]) for reader, order in pairs], axis=1
            )
        group_of = np.searchsorted(self._starts, index, side="right") - 1
        first = int(group_of[0])
        if (group_of == first).all():
            local = index - self._starts[first]
            start = int(local[0])
            array: Array = self._group(first)
            if (np.diff(local) == 1).all():
                return array[start : start + len(local)]
            picked: Array = array[local]
            return picked
        out = np.empty((len(index), self.width), dtype=self._dtype)
        for group in np.unique(group_of):
            where = np.flatnonzero(group_of == group)
            out[where] = self._group(int(group))[index[where] - self._starts[group]]
        return out

    def _group(self, number: int) -> Array:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = self.data.groups[number]
        with group.part.reading():
            # one column: handing it to Arrow's thread pool would cost more than the copy itself
            column = self._file(group.part).read_row_group(group.index, [self._column], use_threads=False).column(0)
            if column.null_count or len(column) < group.rows:
                raise ValueError(f"its column {self._column} has empty places")
        chunks = [_decode(chunk, self._dtype, self.width) for chunk in column.chunks]
        array = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        self._cache[number] = array
        self._cached_bytes += array.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return array

    def _file(self, part: PartFile) -> pq.ParquetFile:
        """The open file of `part`: opening takes longer than reading a row group."""
        if part in self._files:
            self._files.move_to_end(part)
            return self._files[part]
        file = self._files[part] = part.open()
        while len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file


def _decode(chunk: pa.FixedSizeBinaryArray, dtype: np.dtype[np.generic], width: int) -> Array:
    size = width * dtype.itemsize
    flat = np.frombuffer(chunk.buffers()[1], dtype=np.uint8, count=len(chunk) * size, offset=chunk.offset * size)
    return flat.view(dtype).reshape(len(chunk), width)


class SketchReader:
    """Random access to the sketches of one site, as recorded or made from its values; memory like `ValueReader`'s.

    Raises:
        TraceError: the site was recorded at a level below ``sketch``.
    """

    def __init__(self, data: SiteData, cache_bytes: int = CACHE_BYTES) -> None:
        if not (data.has_sketch or data.has_values):
            raise TraceError(f"site {data.site!r} was recorded at a level without sketches: record with --level sketch")
        self.data = data
        self.width = buckets(data.width)
        self._norm = read_statistics(data).norm
        self._values = ValueReader(data, cache_bytes) if data.has_values else None
        # the sketch of a shard is that of its whole row with the other parts 0, so that they add up
        shards = data.shards or (data,)
        self._stored = [] if data.has_values else [_Sketches(one, self.width, cache_bytes) for one in shards]
        self._norms = [] if data.has_values else [read_statistics(one).norm for one in data.shards] or [self._norm]
        self._orders = data.orders or (None,)

    def take(self, index: NDArray[np.integer]) -> NDArray[np.float32]:
        """Sketches of the rows at `index` (any order), float32 [len(index), min(64, width)]."""
        if self._values is not None:
            rows = self._values.take(index)
            return unscale(sketch(rows, row_statistics(rows)), self._norm[index])
        total = np.zeros((len(index), self.width), dtype=np.float32)
        for stored, norm, order in zip(self._stored, self._norms, self._orders, strict=True):
            at = index if order is None else order[index]
            total += unscale(stored.take(at), norm[at])
        return total


class _Sketches(ValueReader):
    """Random access to recorded sketches as stored, of `width` numbers a row."""

    def __init__(self, data: SiteData, width: int, cache_bytes: int) -> None:
        self._open(data, "sketch", stored_dtype(data.dtype), width, cache_bytes)


def iter_blocks(data: SiteData, rows: int = 4096) -> Iterator[Array]:
    """All values of `data` in recorded order, at most `rows` rows at a time."""
    reader = ValueReader(data, cache_bytes=0)
    for start in range(0, data.rows, rows):
        yield reader.take(np.arange(start, min(start + rows, data.rows)))
