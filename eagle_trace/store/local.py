"""Traces in a local folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any

from eagle_trace.checksums import Source
from eagle_trace.store.base import Sink, Store, bounded

#: of the folder of a trace; what is in it has the modes that the umask leaves, so that the folder alone decides
FOLDER_MODE = 0o700


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


class LocalStore(Store):
    """A folder of this machine."""

    remote = False

    def __reduce__(self) -> tuple[Callable[[Path], LocalStore], tuple[Path]]:
        # whoever reads it may run in another folder
        return LocalStore, (self._root.absolute(),)

    def __init__(self, root: Path) -> None:
        self.place = self._root = root

    def is_folder(self) -> bool:
        return self._root.is_dir()

    def is_file(self) -> bool:
        return self._root.is_file()

    def make(self) -> None:
        # what users asked is in it: nobody else enters the folder, until its owner says so with one chmod
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def read(self, name: str, most: int | None = None) -> bytes:
        with contextlib.closing(_LocalSource(self._root / name)) as source:
            return bytes(source.read_at(0, bounded(source.size, most)))

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
