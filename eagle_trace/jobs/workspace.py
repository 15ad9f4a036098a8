"""Where a comparison keeps what it made, and what of it may be used again.

A recording is used again only if it is whole (sealed, not ended early, every checksum right) and its inputs, noted
beside it once it was sealed, are those of this run: the same checkpoints, prompts, options, packages and environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError, OutputExistsError, RecordingError
from eagle_trace.jobs.fingerprint import of_text
from eagle_trace.reader import Trace, open_trace
from eagle_trace.store import FOLDER_MODE, reason

LOCK = ".eagle-trace-compare"


@dataclass
class Workspace:
    """A folder with the recordings of one comparison.

    Attributes:
        folder: where.
        kept: whether the user asked for it; one of ours goes once the comparison is done.
    """

    folder: Path
    kept: bool

    def place(self, name: str) -> Path:
        """Where something called `name` lies."""
        return self.folder / name

    def find(self, name: str, inputs: Mapping[str, Any]) -> Trace | None:
        """The recording `name` if it is whole and was made of `inputs`; None otherwise."""
        try:
            trace = open_trace(self.place(name))
            known = self.holds(name, inputs, trace.manifest.recording)
            whole = known and not (trace.manifest.ended_early or trace.unchecked or trace.verify())
        except EagleTraceError:
            return None  # nothing there, or nothing that can be used: it is recorded again
        return trace if whole else None

    def holds(self, name: str, inputs: Mapping[str, Any], made: str) -> bool:
        """Whether `name`, now `made` (a recording's name, a folder's fingerprint), was noted as made of `inputs`."""
        try:
            noted = json.loads(self._note(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(noted == {"inputs": dict(inputs), "made": made})

    def note(self, name: str, inputs: Mapping[str, Any], made: str) -> None:
        """Say what `name` was made of, once it is whole."""
        note = self._note(name)
        try:
            note.with_suffix(".new").write_text(
                json.dumps({"inputs": dict(inputs), "made": made}) + "\n", encoding="utf-8"
            )
            note.with_suffix(".new").replace(note)
        except OSError as error:
            raise RecordingError(f"cannot write {note}: {reason(error)}") from error

    def forget(self, name: str) -> None:
        """Take the note of `name` away before it is made again."""
        self._note(name).unlink(missing_ok=True)

    def _note(self, name: str) -> Path:
        return self.folder / f"{name}.inputs.json"


@contextlib.contextmanager
def open_workspace(keep: Path | None, identity: Mapping[str, Any]) -> Iterator[Workspace]:
    """`keep`, or a folder of ours that the same command finds again after it was killed.

    One of ours is removed once the block ends; where it ends in an error or a signal, it stays if a recording in it is
    sealed.

    Raises:
        OutputExistsError: `keep` is a file or holds something else, or another comparison is at work there.
        RecordingError: the folder cannot be made.
    """
    folder = keep if keep is not None else _own_folder(identity)
    if keep is not None and (not keep.is_dir() if keep.exists() else keep.is_symlink()):
        raise OutputExistsError(f"{keep} is not a folder: choose another --keep")
    if keep is not None and keep.is_dir() and any(keep.iterdir()) and not (keep / LOCK).exists():
        raise OutputExistsError(f"{keep} holds something else: choose another --keep, or an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise RecordingError(f"cannot make the folder {folder}: {reason(error)}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputExistsError(f"another eagle-trace compare is at work in {folder}: wait for it") from None
        workspace = Workspace(folder, keep is not None)
        done = False
        try:
            yield workspace
            done = True
        finally:
            if keep is None and (done or not any(folder.glob("*.inputs.json"))):
                shutil.rmtree(folder, ignore_errors=True)


def _own_folder(identity: Mapping[str, Any]) -> Path:
    """A folder of this user's cache for the same question; a new one of its own where there is no such cache."""
    name = f"compare-{of_text([json.dumps(identity, sort_keys=True, default=str)])}"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(cache) / "eagle-trace"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="eagle-trace-compare-"))
    return root / name
