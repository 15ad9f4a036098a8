"""Checksums of a trace's files, so that nothing altered is taken for what was recorded.

A Parquet file is hashed piece by piece as it is written. Its footer lists the pieces and carries a checksum of itself,
its **seal**, which the manifest repeats; the manifest ends in a checksum of its own. So whatever is read is verified in
the pass that reads it, wherever the trace lies: of a file of many gigabytes no more is read than is asked for.

The hash is XXH3 (64 bits): it is as fast as memory, where the CRC-32 of Parquet's own page checksums would cost a diff
a fifth of its time (`tests/benchmarks/bench_checksums.py`), and those do not cover headers and footers.
"""

from __future__ import annotations

import io
import re
from typing import Any, Protocol

import xxhash

#: anything with the buffer protocol
Buffer = Any

#: a piece ends once it has so many bytes; what is written at once is never cut
PIECE_BYTES = 64 << 10
#: metadata of a Parquet file: its pieces, which part of which recording it is, and its seal
PIECES_KEY, PART_KEY, SEAL_KEY = "eagle_trace.pieces", "eagle_trace.part", "eagle_trace.seal"

_MAGIC = b"PAR1"
_MARK = b"eagle-trace-seal:"
_DIGITS = 16
_BLANK = b"0" * _DIGITS
#: read from a file's end in the hope that the footer is in it
_TAIL_BYTES = 64 << 10


class AlteredError(ValueError):
    """Bytes are not those that were written."""

    def __init__(self) -> None:
        super().__init__("its checksum is not the one it was written with")


def digest(data: Buffer) -> str:
    """XXH3-64 of `data` as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


class Hasher:
    """Cuts what is written into pieces and hashes each."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._length = 0

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the file, as they are written."""
        if memoryview(data).nbytes < PIECE_BYTES:
            self._add(data)
            return
        # a large page is a piece of its own: a reader of the small columns before it need not read it
        self._end()
        self._add(data)
        self._end()

    def _add(self, data: Buffer) -> None:
        self._hash.update(data)
        self._length += memoryview(data).nbytes
        if self._length >= PIECE_BYTES:
            self._end()

    def _end(self) -> None:
        if self._length:
            self._pieces.append(f"{self._length}:{self._hash.hexdigest()}")
            self._hash.reset()
            self._length = 0

    def text(self) -> str:
        """The pieces, from the first byte on: ``LENGTH:XXH3 LENGTH:XXH3 ...``."""
        self._end()
        return " ".join(self._pieces)


class Pieces:
    """What the pieces of a file hash to.

    Args:
        text: as `Hasher.text` gives it.

    Raises:
        ValueError: it is something else.
    """

    def __init__(self, text: str) -> None:
        import numpy as np  # not above: naming a trace should not take as long as reading one

        found = re.findall(r"(\d{1,18}):([0-9a-f]{16})(?: |\Z)", text, re.ASCII)
        lengths = np.array([int(length) for length, _ in found], dtype=np.int64)
        if " ".join(f"{length}:{value}" for length, value in found) != text or (lengths <= 0).any():
            raise ValueError("its list of checksums makes no sense")
        if lengths.sum(dtype=np.float64) > 1 << 60:
            raise ValueError("its list of checksums makes no sense")
        self.ends = np.cumsum(lengths)
        self.digests = [value for _, value in found]

    @property
    def bytes(self) -> int:
        """How many bytes of the file the pieces cover."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def covering(self, start: int, stop: int) -> range:
        """The pieces that hold bytes from `start` to `stop`."""
        first = int(self.ends.searchsorted(start, side="right"))
        return range(first, min(int(self.ends.searchsorted(stop, side="left")) + 1, len(self.ends)))

    def start(self, piece: int) -> int:
        """Where a piece begins."""
        return int(self.ends[piece - 1]) if piece else 0


def footer_facts(pieces: str, part: str) -> dict[str, str]:
    """Metadata to write into a Parquet file whose pieces are known, before its footer is written."""
    return {PIECES_KEY: pieces, PART_KEY: part, SEAL_KEY: (_MARK + _BLANK).decode()}


def seal_footer(footer: bytes) -> tuple[bytes, str]:
    """A footer with `footer_facts`, up to the end of the file, with its seal put in; and that seal."""
    if int.from_bytes(footer[-8:-4], "little") + 8 != len(footer) or _MARK + _BLANK not in footer:
        raise AssertionError("Parquet wrote something between the last row group and the footer")
    at = footer.rindex(_MARK + _BLANK) + len(_MARK)
    value = digest(footer)
    return footer[:at] + value.encode() + footer[at + _DIGITS :], value


def seal_of(footer: bytes) -> str | None:
    """The seal in a footer; None if there is none.

    Raises:
        AlteredError: the footer is not the one that was sealed.
    """
    at = footer.rfind(_MARK)
    if at < 0:
        return None
    at += len(_MARK)
    value = footer[at : at + _DIGITS]
    if digest(footer[:at] + _BLANK + footer[at + _DIGITS :]).encode() != value:
        raise AlteredError
    return value.decode()


class Source(Protocol):
    """A file that is open for reading (`Store.open`)."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def read_at(self, start: int, count: int) -> Buffer:
        """`count` bytes from `start` on, fewer only at the end of the file."""
        ...

    def close(self) -> None:
        """Done with it."""
        ...


def read_footer(source: Source) -> bytes:
    """Footer of a Parquet file, with the eight bytes behind it.

    Raises:
        ValueError: the file has none.
    """
    tail = bytes(source.read_at(max(0, source.size - _TAIL_BYTES), _TAIL_BYTES))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != _MAGIC or length + len(_MAGIC) > source.size:
        raise ValueError("it does not end as a Parquet file does")
    return tail[-length:] if length <= len(tail) else bytes(source.read_at(source.size - length, length))


class VerifiedFile(io.RawIOBase):
    """The bytes of a source, as Arrow reads them, each held against its checksum before it is given out.

    Args:
        source: closed with the file.
        pieces: of the file; None if it has no checksums.
        footer: verified already, since the pieces do not cover it.
    """

    #: what several columns are read from, one after the other, is read and hashed once
    _KEPT_BYTES = 4 * PIECE_BYTES

    def __init__(self, source: Source, pieces: Pieces | None, footer: bytes) -> None:
        self._source = source
        self._pieces = pieces
        self._footer = footer
        self._at = 0
        self._kept: tuple[int, memoryview] = (0, memoryview(b""))

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def read(self, size: int = -1) -> memoryview:
        """The next bytes, without copying them.

        Raises:
            AlteredError: they are not those that were written.
            OSError: they cannot be read.
        """
        start, whole = self._at, self._source.size
        stop = whole if size < 0 else min(start + size, whole)
        self._at = max(start, stop)
        if stop <= start:
            return memoryview(b"")
        if self._pieces is None:
            return memoryview(self._source.read_at(start, stop - start))
        data_end = self._pieces.bytes
        if start >= data_end:
            return memoryview(self._footer)[start - data_end : stop - data_end]
        found = self._verified(start, min(stop, data_end))
        return found if stop <= data_end else memoryview(bytes(found) + self._footer[: stop - data_end])

    def _verified(self, start: int, stop: int) -> memoryview:
        first, kept = self._kept
        if first <= start and stop <= first + len(kept):
            return kept[start - first : stop - first]
        assert self._pieces is not None
        numbers = self._pieces.covering(start, stop)
        first = self._pieces.start(numbers[0])
        data = memoryview(self._source.read_at(first, int(self._pieces.ends[numbers[-1]]) - first)).cast("B")
        for number in numbers:
            piece = data[self._pieces.start(number) - first : int(self._pieces.ends[number]) - first]
            if digest(piece) != self._pieces.digests[number]:
                raise AlteredError
        if len(data) <= self._KEPT_BYTES:
            self._kept = first, data
        return data[start - first : stop - first]

    def close(self) -> None:
        """Close the source."""
        if not self.closed:
            self._source.close()
            self._kept = (0, memoryview(b""))
        super().close()
