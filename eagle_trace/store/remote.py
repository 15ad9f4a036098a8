"""Traces on a filesystem of fsspec's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from eagle_trace.checksums import Source
from eagle_trace.store.base import Sink, Store, bounded, reason


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


class RemoteStore(Store):
    """A folder of a filesystem of fsspec's: object stores among them."""

    remote = True

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.place = url.rstrip("/")
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def is_folder(self) -> bool:
        return bool(self.sizes())

    def is_file(self) -> bool:
        with _plain_errors():
            return bool(self._filesystem.isfile(self._root))

    def make(self) -> None:
        """Nothing: folders of object stores are there when something is in them."""

    def read(self, name: str, most: int | None = None) -> bytes:
        with _plain_errors():
            if most is not None:
                bounded(int(self._filesystem.size(self._path(name)) or 0), most)
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


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Whatever a driver raises, as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {reason(error)}") from error
