"""A disk that hangs or is slow, for tests: what it does at the moment is read from a file.

The file holds nothing (a good disk), ``hang``, or the seconds that each call takes. `hook` puts it below all that
eagle-trace does with a trace in this process; `sitecustomize` (in `engine_site`) calls it in every process of a server.
A process's first thread is the one that serves or trains: where it touches a bad disk, that is noted in a file beside.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_trace import store, writer
from eagle_trace.store.local import LocalStore

FILE = "EAGLE_TRACE_TEST_DISK"
#: bytes that may wait to be written, instead of the writer's own: a small model fills no more
QUEUE = "EAGLE_TRACE_TEST_QUEUE"
HANG = "hang"
#: what one wait may take longer than it was asked to, on a machine that does other things too [s]; whoever waits for
#: the disk itself waits for good
LATE = 5.0


#: everything that touches a trace
PLACES = [(store.Sink, "write"), *((LocalStore, name) for name in sorted(store.Store.__abstractmethods__))]


def hook() -> None:
    """Let everything that touches a trace pass the fault of the moment first."""
    if QUEUE in os.environ:
        # written to at once, so that it fills while the disk hangs and not at the seal, however fast a server answers
        writer.QUEUE_BYTES, writer.FLUSH_SECONDS = int(os.environ[QUEUE]), 0.0
        # what a slow disk has not taken soon after the end is left out, so that nobody waits for it here
        writer.HURRY_SECONDS = 4.0
    for owner, name in PLACES:
        setattr(owner, name, behind(getattr(owner, name)))


def behind(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, behind what the disk does at the moment."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _suffer()
        return function(*args, **kwargs)

    return call


def touched_by_hosts(disk: Path) -> str:
    """Where threads that serve or train touched the bad disk themselves; empty if they never did."""
    notes = _notes(disk)
    return notes.read_text() if notes.exists() else ""


def _notes(disk: Path) -> Path:
    return disk.with_name(f"{disk.name}.touched")


def _suffer() -> None:
    disk = Path(os.environ[FILE])
    fault = disk.read_text().strip()
    if fault and threading.current_thread() is threading.main_thread():
        with _notes(disk).open("a") as notes:
            notes.write("".join(traceback.format_stack(limit=12)))
    if fault != HANG:
        time.sleep(float(fault or 0))
        return
    while Path(os.environ[FILE]).read_text().strip() == HANG:
        time.sleep(0.05)
