"""One stream of rows, written as Parquet parts of which each is whole.

Rows are gathered until a row group is full. A part is put in its place when it is large enough, or when `save` is
called; then what does not fill a row group yet goes into a part too, which the next one replaces by a longer version
of itself. So a host that is killed loses what came after the last `save`, every part but the last of a stream holds at
least a row group, and a part that is there only ever grows: its first n rows stay its first n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.checksums import footer_facts
from eagle_trace.errors import RecordingError
from eagle_trace.store import Sink, Store, join, reason

#: a part is closed at this size at the latest
LARGEST_PART_BYTES = 64 << 20
#: what is handed to the disk at once, if there is so much
BUFFER_BYTES = 256 << 10


class Numbers:
    """Numbers for the parts of one folder, which several streams may share."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        """The next number."""
        self._next += 1
        return self._next - 1


@dataclass
class _Part:
    """A Parquet file being written."""

    sink: Sink
    #: in front of the sink: Parquet writes some fifty small pieces, and each may cost a slow disk its time
    stream: pa.BufferedOutputStream
    writer: pq.ParquetWriter
    rows: int = 0


class PartStream:
    """Rows of one schema, in order.

    Args:
        store: the trace.
        prefix: of the files' names: ``values/site=fc.out/rank0``.
        numbers: shared by all streams of that prefix.
        schema: of every part.
        make: a table of this schema from things that were added.
        options: for `pyarrow.parquet.ParquetWriter`.
        group_bytes: size of a row group, as `add` counts.
        files, checksums: the manifest's lists, where each part is noted once it is in its place.
        recording: names the recording in each part.
        beat: called after each write that the disk has taken.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        numbers: Numbers,
        schema: pa.Schema,
        make: Callable[[list[Any]], pa.Table],
        options: dict[str, Any],
        group_bytes: int,
        files: dict[str, dict[str, int]],
        checksums: dict[str, str],
        recording: str,
        beat: Callable[[], None],
    ) -> None:
        self._schema = schema
        self._make = make
        self._store = store
        self._prefix = prefix
        self._numbers = numbers
        self._options = options
        self._group_bytes = group_bytes
        self._files = files
        self._checksums = checksums
        self._recording = recording
        self._beat = beat
        #: what waits for its row group, as it came and as tables
        self._raw: list[Any] = []
        self._tables: list[pa.Table] = []
        self._waiting = 0
        self._part: _Part | None = None
        self._name: str | None = None

    def add(self, item: Any, size: int) -> None:
        """Take rows of `size` bytes."""
        self._raw.append(item)
        self._waiting += size
        if self._waiting >= self._group_bytes:
            self._write_group()

    def save(self) -> None:
        """Put everything taken so far into parts that are in their place."""
        if self._part is not None:
            self._write_group()
            self._close()
        elif self._raw:
            size = self._waiting
            tables = self._write_group()
            name = self._name
            self._close()
            # too small to be the last word: kept, and written again as the beginning of a longer part
            self._name, self._tables, self._waiting = name, tables, size

    def discard(self) -> None:
        """Leave no unfinished part behind; parts in their place stay."""
        if self._part is not None:
            part, self._part = self._part, None
            part.sink.discard()

    def _write_group(self) -> list[pa.Table]:
        """Write what waits, and return it."""
        tables, size = self._tables, self._waiting
        if self._raw:
            tables = [*tables, self._make(self._raw)]
        self._raw, self._tables, self._waiting = [], [], 0
        if not tables:
            return []
        data = pa.concat_tables(tables)
        try:
            if self._part is None:
                self._part = self._open()
            # a long prompt arrives in one piece: a reader should not need memory for all of it at once
            groups = max(1, size // self._group_bytes)
            self._part.writer.write_table(data, row_group_size=-(-len(data) // groups))
        except (OSError, pa.ArrowException) as error:
            raise self._failed(error) from error
        self._part.rows += len(data)
        if self._part.sink.bytes >= LARGEST_PART_BYTES:
            self._close()
        return tables

    def _open(self) -> _Part:
        if self._name is None:
            self._name = f"{self._prefix}-{self._numbers.take():05d}.parquet"
        sink = self._store.sink(self._name)
        sink.beat = self._beat
        try:
            stream = pa.BufferedOutputStream(pa.PythonFile(sink, mode="w"), BUFFER_BYTES)
            return _Part(sink, stream, pq.ParquetWriter(stream, self._schema, **self._options))
        except BaseException:
            sink.discard()
            raise

    def _close(self) -> None:
        part, self._part = self._part, None
        if part is None or self._name is None:
            return
        try:
            part.stream.flush()
            facts = footer_facts(part.sink.begin_footer(), f"{self._recording} {self._name}")
            part.writer.add_key_value_metadata(facts)
            part.writer.close()
            part.stream.flush()
            seal = part.sink.write_footer()
            part.sink.commit()
        except (OSError, pa.ArrowException) as error:
            part.sink.discard()
            raise self._failed(error) from error
        self._files[self._name] = {"rows": part.rows, "bytes": part.sink.bytes, "crc32": part.sink.crc32}
        self._checksums[self._name] = seal
        self._name = None

    def _failed(self, error: BaseException) -> RecordingError:
        return RecordingError(f"cannot write {join(self._store.place, self._name or self._prefix)}: {reason(error)}")


def leaves(names: Iterable[str]) -> list[str]:
    """Parquet leaf names of columns (a list's leaf has a name of its own)."""
    return ["path.list.element" if name == "path" else name for name in names]
