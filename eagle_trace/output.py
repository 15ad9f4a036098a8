"""The place for a new trace: refused if it is taken, replaced if that was asked for."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from eagle_trace.errors import OutputExistsError, RecordingError, TraceError
from eagle_trace.manifest import open_seal_name, rank_of_seal, read_manifest, seal_name
from eagle_trace.store import Place, Store, open_store, reason


def check_output(path: Place, *, force: bool = False, rank: int = 0, ranks: int = 1) -> None:
    """Refuse a place for a trace that is taken; changes nothing.

    Raises:
        OutputExistsError: it is a file, or holds something and `force` is not set, or holds something that is no
            trace, or is a link to such a folder, or another process is recording there. Of several `ranks`, only
            what this `rank` wrote is in the way.
    """
    store = open_store(path)
    names = _contents(store)
    seals = [name for name in names if rank_of_seal(name)]
    if ranks > 1 and seals:
        seals = names = [name for name in seals if name in (seal_name(rank), open_seal_name(rank))]
    if not names:
        return
    if not force:
        raise OutputExistsError(f"{path} exists: choose another --out, or --force to replace it")
    if isinstance(store.place, Path) and store.place.is_symlink():
        raise OutputExistsError(
            f"{path} is a link to {store.place.resolve()}, so --force does not replace it: name that folder itself"
        )
    if not seals:
        raise OutputExistsError(f"{path} exists and is no trace, so --force does not replace it: choose another --out")
    for name in seals:
        _refuse_running(store, name)


def prepare_output(path: Place, *, force: bool = False, rank: int = 0, ranks: int = 1) -> None:
    """Make `path` a folder for a trace: empty, but for what the other `ranks` write there.

    Raises:
        OutputExistsError: see `check_output`.
        RecordingError: the folder cannot be made.
    """
    check_output(path, force=force, rank=rank, ranks=ranks)
    store = open_store(path)
    try:
        if ranks == 1:
            store.clear()
        else:
            for name in _contents(store, deep=True):
                if name in (seal_name(rank), open_seal_name(rank)) or f"/rank{rank}-" in name:
                    store.remove(name)
        store.make()
    except OSError as error:
        raise RecordingError(f"cannot make the folder {path}: {reason(error)}") from error


def is_sealed(path: Place) -> bool:
    """Whether a whole trace is there, as far as its folder can be read."""
    with contextlib.suppress(OSError, TraceError):
        return open_store(path).exists(seal_name(0))
    return False


def remove_empty(path: Place) -> None:
    """Take away the folder where nothing was recorded, so that the next try does not stumble over it."""
    if isinstance(path, Path):
        with contextlib.suppress(OSError):
            path.rmdir()


def _contents(store: Store, *, deep: bool = False) -> list[str]:
    """What lies in the folder; a file in its place, or a link to nothing, is refused."""
    try:
        if isinstance(store.place, Path) and not deep:
            return [entry.name for entry in store.place.iterdir()]
        return list(store.sizes())
    except FileNotFoundError:
        if isinstance(store.place, Path) and store.place.is_symlink():
            raise OutputExistsError(f"{store.place} is a link to nothing: choose another --out") from None
        return []
    except NotADirectoryError:
        raise OutputExistsError(f"{store.place} exists and is not a folder: choose another --out") from None
    except OSError as error:
        raise RecordingError(f"cannot read the folder {store.place}: {reason(error)}") from error


def _refuse_running(store: Store, name: str) -> None:
    """A recording that is not sealed says which process makes it; one on this machine can be asked whether it lives."""
    try:
        host, _, pid = read_manifest(store, name).recorder.rpartition(":")
        if host != socket.gethostname() or int(pid) == os.getpid():
            return
        os.kill(int(pid), 0)
    except (OSError, ValueError, OverflowError, TraceError):
        return
    raise OutputExistsError(
        f"process {pid} is recording into {store.place}: "
        "end it first, or choose another --out (if it is something else that has this number by now, remove the folder)"
    )
