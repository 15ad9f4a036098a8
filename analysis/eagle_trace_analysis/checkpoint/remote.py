"""A checkpoint's folder that lies elsewhere (``hf://owner/name``, ``s3://bucket/draft``), read through fsspec.

A `RemotePath` does what the readers of a folder ask of a `Path`: list it, read a small file, open a large one and read
pieces of it. Nothing is fetched but what is read, and nothing is kept on disk. Bytes are counted.
"""

from __future__ import annotations

import fnmatch
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar, cast

from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.extras import way_to
from eagle_trace.store import is_url, reason

Result = TypeVar("Result")

#: of a small file (configs, an index), the most that is read
MOST_TEXT = 32 << 20
#: of a large file, what is fetched at least when its beginning is read: one request for most headers
HEADER_BYTES = 64 << 10
#: what is kept of what was read, since several checks read the same small tensors: a range, and all of them
KEPT_RANGE, KEPT_ALL = 2 << 20, 32 << 20
#: endings of what is read of a checkpoint
READ = (".json", ".safetensors", ".bin", ".pt")
#: how long one folder may be asked, all requests together [s]
SECONDS = 300.0
#: extras that bring a protocol's driver
DRIVERS = {"hf": "hub", "s3": "s3"}

#: what drivers stumble over where an answer is not what they take it for; their words are Python's
_MISREAD = (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError)


@dataclass
class Meter:
    """What was fetched of a place, and until when it may be asked."""

    place: str
    fetched: int = 0
    requests: int = 0
    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def check(self) -> None:
        """Raises CheckpointError once the time is over."""
        if time.monotonic() > self.end:
            raise CheckpointError(
                f"{self.place} was asked for {SECONDS:g} s and has not answered everything: download the folder and "
                "give that"
            )


class Reach:
    """A filesystem of fsspec's with the sizes of one folder's files."""

    def __init__(self, place: str, filesystem: Any, root: str) -> None:
        self.place, self.root = place, root.rstrip("/")
        self.meter = Meter(place)
        self._filesystem = filesystem
        self._kept: dict[tuple[str, int, int], bytes] = {}
        found = self.ask("list", lambda: filesystem.ls(self.root, detail=True))
        self.sizes: dict[str, int] = self.ask("list", lambda: dict(self._entries(found)))

    def _entries(self, found: Any) -> Iterator[tuple[str, int]]:
        for one in found:
            # web servers list names alone
            unsaid = one["size"] is None
            if one["type"] == "file" and (not unsaid or str(one["name"]).endswith(READ)):
                size = self._size_of(str(one["name"])) if unsaid else one["size"]
                if type(size) is not int or size < 0:
                    raise ValueError(f"it lists a file of {size!r} bytes")
                yield str(one["name"]).rsplit("/", 1)[-1], size

    def _size_of(self, place: str) -> Any:
        self.meter.check()
        self.meter.requests += 1
        # a hub says sizes, or it is none
        info = getattr(self._filesystem, "info", None)
        return None if info is None else info(place)["size"]

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of a file, exactly as many as asked for.

        Raises:
            CheckpointError: the other side gives others.
        """
        path, wanted = f"{self.root}/{name}", (name, start, length)
        if (kept := self._kept.get(wanted)) is not None:
            return kept

        def work() -> bytes:
            with self._filesystem.open(path, "rb", cache_type="none") as file:
                file.seek(start)
                return bytes(file.read(length))

        data = self.ask(f"read {name} of", work)
        if len(data) != length:
            raise CheckpointError(
                f"{self.place}/{name} gives {len(data):,} bytes where {length:,} were asked for: the server does not "
                "serve the file that it lists"
            )
        self.meter.fetched += len(data)
        if length <= KEPT_RANGE and sum(map(len, self._kept.values())) + length <= KEPT_ALL:
            self._kept[wanted] = data
        return data

    def ask(self, what: str, work: Callable[[], Result]) -> Result:
        """What `work` gives, its failure in one sentence."""
        self.meter.check()
        self.meter.requests += 1
        try:
            return work()
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointError(f"cannot {what} {self.place}: it is not there") from error
        except _MISREAD as error:
            whose = "the hub's" if self.place.startswith("hf://") else "the server's"
            wanted = "a list of files" if what == "list" else "a file's bytes"
            raise CheckpointError(f"cannot {what} {self.place}: {whose} answer is not {wanted}") from error
        except Exception as error:  # every driver has errors of its own
            raise CheckpointError(f"cannot {what} {self.place}: {reason(error)}") from error


class RemotePath:
    """A folder, or a file directly in it. What is asked of it is what `pathlib.Path` is asked."""

    def __init__(self, reach: Reach, name: str = "") -> None:
        self._reach, self.name = reach, name

    @property
    def meter(self) -> Meter:
        """What was fetched of the folder."""
        return self._reach.meter

    @property
    def suffix(self) -> str:
        """The name's ending, with its dot."""
        return Path(self.name).suffix

    def __str__(self) -> str:
        return f"{self._reach.place}/{self.name}" if self.name else self._reach.place

    __repr__ = __str__

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._reach, name)

    def __lt__(self, other: RemotePath) -> bool:
        return self.name < other.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def is_dir(self) -> bool:
        """Whether it is the folder."""
        return not self.name

    def is_file(self) -> bool:
        """Whether it is a file of the folder."""
        return self.name in self._reach.sizes

    exists = is_file

    def stat(self) -> Any:
        """Its size, as it was listed."""
        return SimpleNamespace(st_size=self._size())

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Files of the folder whose names match."""
        for name in sorted(self._reach.sizes):
            if fnmatch.fnmatchcase(name, pattern):
                yield RemotePath(self._reach, name)

    def iterdir(self) -> Iterator[RemotePath]:
        """All files of the folder."""
        return self.glob("*")

    def read_text(self, encoding: str = "utf-8") -> str:
        """A small file's text."""
        size = self._size()
        if size > MOST_TEXT:
            raise CheckpointError(f"{self} takes {size:,} bytes, which is not a file to be read whole")
        return self._reach.read(self.name, 0, size).decode(encoding)

    def open(self, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
        """The file for reading by ranges; with `buffering` 0 each read is one request."""
        if mode != "rb":
            raise ValueError(f"a remote file is not opened for {mode!r}")
        raw = _Ranges(self._reach, self.name, self._size())
        return cast(IO[bytes], raw if buffering == 0 else io.BufferedReader(raw, HEADER_BYTES))

    def resolve(self) -> RemotePath:
        """Itself."""
        return self

    @property
    def parent(self) -> RemotePath:
        """The folder: nothing beside or above it is looked at."""
        return RemotePath(self._reach)

    def _size(self) -> int:
        if not self.is_file():
            raise CheckpointError(f"{self} is not there")
        return self._reach.sizes[self.name]


class _Ranges(io.RawIOBase):
    """A file of which each read is a request."""

    def __init__(self, reach: Reach, name: str, size: int) -> None:
        super().__init__()
        self._reach, self._name, self._size, self._at = reach, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), max(self._size - self._at, 0))
        if length:
            buffer[:length] = self._reach.read(self._name, self._at, length)
            self._at += length
        return length


def folder_of(place: str | Path) -> Path:
    """A folder by its path, or by a URL of fsspec's.

    What is returned for a URL is a `RemotePath`, which does what is asked of a checkpoint's folder.

    Raises:
        CheckpointError: it cannot be reached.
        UsageError: a package is missing, or the URL is none.
    """
    if isinstance(place, RemotePath):
        return cast(Path, place)
    if not is_url(place):
        return Path(place)
    text = str(place)
    text = text.rstrip("/") if not text.endswith("://") else text
    return cast(Path, RemotePath(Reach(text, *_filesystem(text))))


def is_remote(place: object) -> bool:
    """Whether reading of a place costs a request."""
    return isinstance(place, RemotePath)


def fetched(*places: object) -> int | None:
    """Bytes fetched of these places; None if all of them are local."""
    meters = {id(one.meter): one.meter for one in places if isinstance(one, RemotePath)}
    return sum(meter.fetched for meter in meters.values()) if meters else None


def _filesystem(place: str) -> tuple[Any, str]:
    protocol, _, rest = place.partition("://")
    try:
        if protocol == "hf":
            from eagle_trace_analysis.checkpoint.hub import hub

            return hub(), _repository(place, rest)
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(place)
    except ImportError as error:
        way = way_to(DRIVERS[protocol]) if protocol in DRIVERS else f"pip install {error.name or protocol}"
        raise UsageError(f"{place} needs a package that is not installed: {way}") from error
    except ValueError as error:
        raise UsageError(f"{place}: {reason(error)}") from error
    return filesystem, root


def _repository(place: str, rest: str) -> str:
    if rest.count("/") < 1 or not all(rest.split("/")):
        raise UsageError(f"{place} is not a repository of the hub: give hf://owner/name, or hf://owner/name@revision")
    return rest
