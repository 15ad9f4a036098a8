"""What every store offers, and how places are named."""

from __future__ import annotations

import io
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from eagle_trace.checksums import Hasher, Source, seal_footer

#: what a caller may name a trace with; a `Path` is local, a text with ``://`` goes to fsspec
Place = Path | str


def is_url(place: Place) -> bool:
    """Whether `place` names a filesystem of fsspec's."""
    return isinstance(place, str) and "://" in place


def as_place(text: str) -> Place:
    """`text` as the command line gives it: a URL as it is, anything else as a local path."""
    return text if is_url(text) else Path(text)


def same_place(one: Place, other: Place) -> bool:
    """Whether both name one trace."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return str(one).rstrip("/") == str(other).rstrip("/")


def join(place: Place, name: str) -> str:
    """Full name of a file of a trace, for messages and for readers of plain Parquet."""
    return f"{place.rstrip('/')}/{name}" if isinstance(place, str) else str(place / name)


def reason(error: BaseException) -> str:
    """Why the operating system refused, in its own words and without the path."""
    if isinstance(error, OSError) and error.errno:
        return f"{error.strerror or os.strerror(error.errno)} (errno {error.errno})"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _nothing() -> None:
    """Nobody counts the writes."""


class Sink(io.RawIOBase):
    """A file being written. It is there only once `commit` was called, then as a whole.

    Attributes:
        bytes: how many were written.
        crc32: of all of them.
        discarded: whether nobody wants it any more.
        beat: called after each write.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hasher = Hasher()
        self._footer: list[bytes] | None = None
        self.bytes = 0
        self.crc32 = 0
        self.discarded = False
        self.beat: Callable[[], None] = _nothing

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Append `data`."""
        size = len(data)
        if self.discarded:
            return size  # a writer that is dropped tries to end its file
        if self._footer is not None:
            self._footer.append(bytes(data))
            return size
        self._stream.write(data)
        self._hasher.update(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += size
        self.beat()
        return size

    def tell(self) -> int:
        """How many bytes were written."""
        return self.bytes + sum(map(len, self._footer or ()))

    def begin_footer(self) -> str:
        """The checksums of what was written so far; from here on, bytes are held back as the file's footer."""
        pieces = self._hasher.text()
        self._footer = []
        return pieces

    def write_footer(self) -> str:
        """Write what was held back with its seal in it, and return the seal (`eagle_trace.checksums`)."""
        footer, seal = seal_footer(b"".join(self._footer or ()))
        self._footer = None
        self.write(footer)
        return seal

    def commit(self) -> None:
        """Put the file where readers look for it, in place of an older one of that name."""
        self._stream.close()

    def discard(self) -> None:
        """Leave no file behind."""
        self.discarded = True


class Store(ABC):
    """Files of one trace. See `open_store`."""

    #: whether a read is a request to another machine
    remote: bool
    place: Place

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether there is such a folder."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether there is a file in the folder's place."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder if it is not there."""

    @abstractmethod
    def read(self, name: str, most: int | None = None) -> bytes:
        """A whole file.

        Raises:
            OSError: it is not there, is not a regular file, or has more than `most` bytes.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a file is there."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Name and bytes of every regular file."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a whole file: a reader sees all of it or the older one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not be there yet: FileExistsError if it is."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file that may be there."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything in the folder."""

    @abstractmethod
    def sink(self, name: str) -> Sink:
        """A new file to write."""

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open a file for reading.

        Raises:
            OSError: it is not there, or is not a regular file.
        """


def bounded(size: int, most: int | None) -> int:
    """`size`; raises OSError if that is more than `most` bytes."""
    if most is not None and size > most:
        raise OSError(f"it has {size} bytes, more than any such file")
    return size
