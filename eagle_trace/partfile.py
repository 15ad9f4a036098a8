"""One Parquet file of a trace, every byte of which is held against its checksum as it is read."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.checksums import PART_KEY, PIECES_KEY, AlteredError, Pieces, VerifiedFile, read_footer, seal_of
from eagle_trace.errors import TraceDamagedError
from eagle_trace.store import Store, join, reason

#: a row takes some bytes however well it is compressed: what a footer claims beyond that is not given memory
_ROWS_A_BYTE, _FEW_ROWS = 64, 1 << 16
_VERIFIED_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class PartFile:
    """One Parquet file of a trace.

    Attributes:
        store, name: where it is.
        rows: how many of its rows, from the first, belong to the trace.
        seal: its seal as the manifest has it (`eagle_trace.checksums`); None for one of a trace without checksums.
        growing: name of the recording (empty in older traces), if the file may have grown since the manifest was
            written; None if it is sealed.
    """

    store: Store
    name: str
    rows: int
    seal: str | None = None
    growing: str | None = None

    def __str__(self) -> str:
        return join(self.store.place, self.name)

    @cached_property
    def _footer(self) -> tuple[bytes, pq.FileMetaData, Pieces | None]:
        """Verified, read once."""
        with self.reading(), contextlib.closing(self.store.open(self.name)) as source:
            footer, size = read_footer(source), source.size
            seal = seal_of(footer)
            if seal is None and self.seal is not None:
                raise AlteredError
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
            given = metadata.metadata or {}
            pieces = None if seal is None else Pieces(given[PIECES_KEY.encode()].decode())
            if pieces is not None and pieces.bytes + len(footer) != size:
                raise AlteredError
            _check_sizes(metadata, size)
        if self.seal is not None and seal != self.seal:
            part = f"{self.growing} {self.name}".encode()
            if not self.growing or metadata.num_rows <= self.rows or given.get(PART_KEY.encode()) != part:
                raise TraceDamagedError(
                    f"{self} is not the file that was recorded under this name: record the trace again"
                )
        return footer, metadata, pieces

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The footer, read once (raises TraceDamagedError)."""
        metadata = self._footer[1]
        if metadata.num_rows < self.rows:
            raise TraceDamagedError(f"{self} has {metadata.num_rows} rows, not {self.rows}: record the trace again")
        if metadata.num_rows > self.rows and self.growing is None:
            raise TraceDamagedError(f"{self} has {metadata.num_rows} rows, not {self.rows}: record the trace again")
        return metadata

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the file, with eagle-trace's own metadata."""
        with self.reading():
            return self.metadata.schema.to_arrow_schema()

    def reading(self) -> _Reading:
        """A context in which whatever goes wrong is this file's damage."""
        return _Reading(self)

    def open(self) -> pq.ParquetFile:
        """The file, every byte of which is held against its checksum as it is read."""
        metadata = self.metadata
        footer, _, pieces = self._footer
        with self.reading():
            file = VerifiedFile(self.store.open(self.name), pieces, footer)
            # one request for neighbouring columns, which matters where a trace is not on this machine
            return pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=metadata, pre_buffer=self.store.remote)

    def verify(self, crc32: int | None = None) -> None:
        """Read the whole file and hold it against every checksum there is.

        Raises:
            TraceDamagedError: it was altered.
        """
        footer, _, pieces = self._footer
        with self.reading(), VerifiedFile(self.store.open(self.name), pieces, footer) as file:
            found = 0
            while data := file.read(_VERIFIED_BYTES):
                found = zlib.crc32(data, found)
            if crc32 is not None and found != crc32:
                raise AlteredError

    def read(self, groups: Sequence[int] | None, columns: list[str]) -> pa.Table:
        """Some columns of some row groups, or of all the rows that belong to the trace."""
        with self.reading(), self.open() as file:
            if groups is not None:
                table = file.read_row_groups(groups, columns=columns, use_threads=False)
            else:
                table = file.read(columns=columns, use_threads=False).slice(0, self.rows)
            return table.select(columns)


def _check_sizes(metadata: pq.FileMetaData, size: int) -> None:
    """Refuse a footer that claims more than its file can hold."""
    most = _FEW_ROWS + _ROWS_A_BYTE * size
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    rows = [group.num_rows for group in groups]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows or metadata.num_rows > most:
        raise ValueError(f"its footer counts {metadata.num_rows} rows in {size} bytes")
    for group in groups:
        columns = [group.column(index) for index in range(group.num_columns)]
        if any(not 0 <= column.num_values <= most for column in columns):
            raise ValueError(f"its footer counts more values than {size} bytes can hold")


class _Reading:
    def __init__(self, part: PartFile) -> None:
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, AlteredError):
            raise TraceDamagedError(f"{self._part} was altered: {error}: record the trace again") from error
        # a footer that parses may still name columns or text that are not there
        if isinstance(error, (OSError, pa.ArrowException, ValueError, KeyError, OverflowError, MemoryError)):
            raise TraceDamagedError(
                f"{self._part} cannot be read as Parquet ({reason(error)}): record the trace again"
            ) from error
