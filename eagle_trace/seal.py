"""The seal of what one rank records: an open one while it is written, the manifest once all of it is there."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

from eagle_trace.errors import OutputExistsError, RecordingError, TraceError
from eagle_trace.manifest import Manifest, open_seal_name, read_manifest, seal_name
from eagle_trace.store import Store, join, reason


class Seal:
    """Says in a trace's folder who writes there, how far that is whole, and that it is done.

    Args:
        store: the trace.
        manifest: of this rank; what it says at the time is what is written.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._name, self._open_name = seal_name(manifest.rank), open_seal_name(manifest.rank)

    def claim(self) -> None:
        """Make the folder this recorder's own.

        Raises:
            OutputExistsError: somebody records there, or recorded there.
            RecordingError: it cannot be written.
        """
        manifest, store = self._manifest, self._store
        taken = f"{join(store.place, self._name)} is there or being made: two recorders cannot write one trace"
        manifest.recorder = f"{socket.gethostname()}:{os.getpid()}"
        manifest.recording = secrets.token_hex(8)
        try:
            store.make()
            if store.exists(self._name):
                raise OutputExistsError(taken)
            store.create(self._open_name, manifest.to_bytes())
        except FileExistsError as error:
            raise OutputExistsError(taken) from error
        except OSError as error:
            raise RecordingError(f"cannot write into {store.place}: {reason(error)}") from error

    def update(self, waited: float) -> None:
        """Say that the files that the manifest names belong together, as they are.

        Args:
            waited: how long the host has waited for the disk so far [s].

        Raises:
            RecordingError: it cannot be written.
        """
        self._manifest.flushed = datetime.now(UTC).isoformat(timespec="seconds")
        self._manifest.waited_seconds = waited
        try:
            self._manifest.write(self._store, self._open_name)
        except OSError as error:
            raise RecordingError(f"cannot write into {self._store.place}: {reason(error)}") from error

    def close(self) -> None:
        """Say that it is done.

        Raises:
            RecordingError: a file is not as it was written, or the seal cannot be.
        """
        manifest, store = self._manifest, self._store
        manifest.recorder = ""
        try:
            if isinstance(store.place, Path):
                for name, facts in manifest.files.items():
                    if (store.place / name).stat().st_size != facts["bytes"]:
                        raise RecordingError(f"{store.place / name} was changed by somebody else")
            manifest.write(store, self._name)
            store.remove(self._open_name)
        except OSError as error:
            raise RecordingError(f"cannot seal {store.place}: {reason(error)}") from error

    def note(self, failure: BaseException, waited: float) -> None:
        """What was saved last stays as it is, but says why it ends there and that nobody is at work any more."""
        with contextlib.suppress(OSError, TraceError):
            saved = read_manifest(self._store, self._open_name)
            saved.recorder, saved.stopped, saved.waited_seconds = "", reason(failure), waited
            saved.write(self._store, self._open_name)
