"""A trace as one stream of bytes, as a server sends it and a client takes it: a plain tar of the trace's own files.

Both ends are written for an other end that cannot be trusted. Only regular files whose names are those of a trace
(`eagle_trace.contents`) go in and come out; links, devices, sparse files and every extension of the format are refused.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import zlib
from collections.abc import Generator, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from eagle_trace.contents import is_trace_file, is_trace_folder, trace_files
from eagle_trace.manifest import rank_of_seal
from eagle_trace.store import reason

BLOCK_BYTES = 1 << 20
#: it is read as a whole
MANIFEST_BYTES = 32 << 20
_RECORD = tarfile.BLOCKSIZE
_END = bytes(2 * _RECORD)
#: what other writers of tar put in front of a file (its times, to the nanosecond); skipped, and never this long
_EXTENSION_BYTES = 8 << 10
#: zeros with which other writers fill their last record
_FILL_BYTES = 64 << 10


class ArchiveError(Exception):
    """The stream is not a whole trace; the message is the reason in a few words."""


def pack(path: Path) -> tuple[int, Generator[bytes]]:
    """Length in bytes, and the bytes, of the trace at `path`.

    The length is known before the first byte, and a file that changes meanwhile raises from the iterator, so that a
    download that breaks cannot be taken for a whole one.

    Raises:
        OSError: it cannot be read.
    """
    files = trace_files(path)
    headers = {name: _header(name, size) for name, size in files.items()}
    length = sum(_RECORD + _padded(size) for size in files.values()) + len(_END)
    return length, _blocks(path, files, headers)


def _blocks(path: Path, files: dict[str, int], headers: dict[str, bytes]) -> Generator[bytes]:
    for name, size in files.items():
        yield headers[name]
        # not through a link, and not waiting for whoever writes into a pipe
        descriptor = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
                raise OSError(f"{name} changed while it was sent")
            left = size
            while left:
                block = stream.read(min(left, BLOCK_BYTES))
                if not block:
                    raise OSError(f"{name} changed while it was sent")
                left -= len(block)
                yield block
        if fill := _padded(size) - size:
            yield bytes(fill)
    yield _END


def unpack(stream: BinaryIO, folder: Path, *, max_bytes: int, max_files: int) -> dict[str, int]:
    """Put the files of a trace from `stream` into `folder`, which must be empty and nobody else's.

    Args:
        stream: what a server sends.
        folder: where the files go.
        max_bytes: of all files.
        max_files: how many.

    Returns:
        CRC-32 of each file, as it came.

    Raises:
        ArchiveError: it is not a whole trace, or more than it may be, or cannot be written.
        TimeoutError: the stream's own.
    """
    found: dict[str, int] = {}
    while (header := _exactly(stream, _RECORD)) != _END[:_RECORD]:
        name, size, kind = _parse(header)
        if kind == tarfile.XHDTYPE and size <= _EXTENSION_BYTES:
            _exactly(stream, _padded(size))
        elif kind == tarfile.DIRTYPE and size == 0 and is_trace_folder(name):
            continue
        elif kind in (tarfile.REGTYPE, tarfile.AREGTYPE) and is_trace_file(name):
            max_bytes -= size
            if len(found) >= max_files or max_bytes < 0:
                raise ArchiveError("it sends more than it said")
            if rank_of_seal(name) and size > MANIFEST_BYTES:
                raise ArchiveError(f"its {name} has {size} bytes, which no manifest has")
            found[name] = _take(stream, folder, name, size)
        else:
            raise ArchiveError(f"it sends {name[:80]!r}, which is not a file of a trace")
    rest = _exactly(stream, _RECORD) + stream.read(_FILL_BYTES)
    if len(rest) > _FILL_BYTES or rest.strip(b"\0"):
        raise ArchiveError("it sends more than a trace")
    return found


def _take(stream: BinaryIO, folder: Path, name: str, size: int) -> int:
    path = folder / name
    with _writing(name):
        for parent in reversed(path.relative_to(folder).parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
        out = path.open("xb")
    left, crc = size, 0
    with _writing(name), out:
        while left:
            block = _exactly(stream, min(left, BLOCK_BYTES))
            crc = zlib.crc32(block, crc)
            left -= out.write(block)
    _exactly(stream, _padded(size) - size)
    return crc


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except FileExistsError:
        raise ArchiveError(f"it sends {name} twice") from None
    except OSError as error:
        raise ArchiveError(f"{name} cannot be written: {reason(error)}") from error


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except ValueError as error:
        raise OSError(f"{name} of {size} bytes does not go into a tar") from error


def _parse(header: bytes) -> tuple[str, int, bytes]:
    """Name, bytes and type of one entry."""
    try:
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.TarError, ValueError):
        raise ArchiveError("what it sends is not a tar") from None
    name = info.name.removeprefix("./").rstrip("/")
    if info.size < 0:
        raise ArchiveError(f"it sends {name[:80]!r} of {info.size} bytes")
    return "" if name == "." else name, info.size, info.type


def _exactly(stream: BinaryIO, size: int) -> bytes:
    try:
        data = stream.read(size) if size else b""
    except TimeoutError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        raise ArchiveError(f"it broke off: {reason(error)}") from error
    if len(data) != size:
        raise ArchiveError("it broke off")
    return data


def _padded(size: int) -> int:
    return -(-size // _RECORD) * _RECORD
