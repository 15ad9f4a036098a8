"""Where a trace lies: a local folder, or a folder on any filesystem that fsspec knows (``s3://bucket/run.trace``).

Names of files are relative to the trace, with ``/``. Every failure is an `OSError`, whatever library it came from.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from eagle_trace.checksums import Hasher, Source, seal_footer
from eagle_trace.errors import UsageError

#: what a caller may name a trace with; a `Path` is local, a text with ``://`` goes to fsspec
Place = Path | str

#: packages that fsspec needs for a protocol and does not bring along
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "hf"}


#: of the folder of a trace; what is in it has the modes that the umask leaves, so that the folder alone decides
FOLDER_MODE = 0o700


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


def open_store(place: Place) -> Store:
    """The store at `place`.

    Raises:
        UsageError: nobody here knows how to reach it; the message names the package to install.
    """
    if not is_url(place):
        return _LocalStore(Path(place))
    import fsspec

    protocol = str(place).split("://", 1)[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(str(place))
    except ImportError as error:
        package = _DRIVERS.get(protocol, error.name or protocol)
        raise UsageError(f"{place} needs a package that is not installed: pip install {package}") from error
    except ValueError as error:
        raise UsageError(f"{place}: {reason(error)}") from error
    except Exception as error:  # every driver has errors of its own
        raise UsageError(f"cannot reach {place}: {reason(error)}") from error
    if protocol in ("file", "local"):
        return _LocalStore(Path(root))
    return _RemoteStore(str(place), filesystem, root)


class _LocalSink(Sink):
    """Beside its place until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.tmp")
        super().__init__(self._partial.open("wb", buffering=1 << 17))

    def commit(self) -> None:
        super().commit()
        self._partial.replace(self._path)

    def discard(self) -> None:
        super().discard()
        with contextlib.suppress(OSError):  # a stream that cannot flush (disk full) raises once more on closing
            self._stream.close()
        with contextlib.suppress(OSError):
            self._partial.unlink()


class _LocalStore(Store):
    remote = False

    def __reduce__(self) -> tuple[Callable[[Path], _LocalStore], tuple[Path]]:
        # whoever reads it may run in another folder
        return _LocalStore, (self._root.absolute(),)

    def __init__(self, root: Path) -> None:
        self.place = self._root = root

    def is_folder(self) -> bool:
        return self._root.is_dir()

    def make(self) -> None:
        # what users asked is in it: nobody else enters the folder, until its owner says so with one chmod
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def read(self, name: str, most: int | None = None) -> bytes:
        with contextlib.closing(_LocalSource(self._root / name)) as source:
            return bytes(source.read_at(0, _bounded(source.size, most)))

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def sizes(self) -> dict[str, int]:
        found = {}
        for folder, _, files in os.walk(self._root):
            for file in files:
                path = Path(folder) / file
                with contextlib.suppress(FileNotFoundError):  # a link to nothing, or gone by now
                    facts = path.stat()
                    if S_ISREG(facts.st_mode):
                        found[path.relative_to(self._root).as_posix()] = facts.st_size
        return found

    def write(self, name: str, data: bytes) -> None:
        partial = self._root / f".{name}.tmp"
        try:
            with partial.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self._root / name)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def create(self, name: str, data: bytes) -> None:
        with (self._root / name).open("xb") as stream:
            stream.write(data)

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def clear(self) -> None:
        for entry in self._root.iterdir() if self._root.exists() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def sink(self, name: str) -> Sink:
        folder = self._root
        for part in name.split("/")[:-1]:
            # one by one: a trace whose own folder vanished must not come back half empty
            folder = folder / part
            folder.mkdir(exist_ok=True)
        return _LocalSink(self._root / name)

    def open(self, name: str) -> Source:
        return _LocalSource(self._root / name)


class _LocalSource:
    _file = -1

    def __init__(self, path: Path) -> None:
        # a pipe that nobody writes into must not be waited for
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        facts = os.fstat(self._file)
        if not S_ISREG(facts.st_mode):
            self.close()
            raise OSError("it is not a regular file")
        self.size = facts.st_size

    def read_at(self, start: int, count: int) -> Any:
        import pyarrow as pa  # not above: naming a trace should not take as long as opening it

        # Arrow's memory is used again where Python's is given back to the system and zeroed anew
        data = pa.allocate_buffer(max(0, min(count, self.size - start)))
        view, done = memoryview(data), 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], start + done)
            if not got:
                raise OSError("it became shorter while it was read")
            done += got
        return data

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        self.close()


class _RemoteSink(Sink):
    """Object stores show a file once its upload has ended: they need no other name meanwhile."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        with _plain_errors():
            super().__init__(filesystem.open(path, "wb"))

    def write(self, data: Any) -> int:
        with _plain_errors():
            return super().write(bytes(data))

    def commit(self) -> None:
        with _plain_errors():
            super().commit()

    def discard(self) -> None:
        super().discard()
        with contextlib.suppress(Exception):  # whatever a driver raises for what it never began
            getattr(self._stream, "discard", self._stream.close)()


class _RemoteStore(Store):
    remote = True

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.place = url.rstrip("/")
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def is_folder(self) -> bool:
        return bool(self.sizes())

    def make(self) -> None:
        """Nothing: folders of object stores are there when something is in them."""

    def read(self, name: str, most: int | None = None) -> bytes:
        with _plain_errors():
            if most is not None:
                _bounded(int(self._filesystem.size(self._path(name)) or 0), most)
            return bytes(self._filesystem.cat_file(self._path(name)))

    def exists(self, name: str) -> bool:
        with _plain_errors():
            return bool(self._filesystem.exists(self._path(name)))

    def sizes(self) -> dict[str, int]:
        with _plain_errors():
            self._filesystem.invalidate_cache()
            found = self._filesystem.find(self._root, detail=True)
            start = len(self._root.lstrip("/")) + 1
            return {path.lstrip("/")[start:]: int(facts["size"] or 0) for path, facts in found.items()}

    def write(self, name: str, data: bytes) -> None:
        with _plain_errors():
            self._filesystem.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> None:
        with _plain_errors():
            try:
                self._filesystem.pipe_file(self._path(name), data, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                # this filesystem cannot do it in one step: two recorders that start in the same instant both pass
                if self._filesystem.exists(self._path(name)):
                    raise FileExistsError(self._path(name)) from None
                self._filesystem.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with _plain_errors(), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def clear(self) -> None:
        with _plain_errors(), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._root, recursive=True)

    def sink(self, name: str) -> Sink:
        return _RemoteSink(self._filesystem, self._path(name))

    def open(self, name: str) -> Source:
        with _plain_errors():
            # no read-ahead: Arrow asks for exactly the bytes of a row group, once, in one piece
            return _RemoteSource(self._filesystem.open(self._path(name), "rb", cache_type="none"))


class _RemoteSource:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        size = getattr(stream, "size", None)
        self.size = int(stream.seek(0, os.SEEK_END) if size is None else size)

    def read_at(self, start: int, count: int) -> Any:
        with _plain_errors():
            self._stream.seek(start)
            return self._stream.read(max(0, min(count, self.size - start)))

    def close(self) -> None:
        self._stream.close()


def _bounded(size: int, most: int | None) -> int:
    if most is not None and size > most:
        raise OSError(f"it has {size} bytes, more than any such file")
    return size


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Whatever a driver raises, as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {reason(error)}") from error
