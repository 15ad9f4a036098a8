"""A disk that hangs or is slow, for tests: what it does at the moment is read from a file.

The file holds nothing (a good disk), ``hang``, or the seconds that each write takes. `hook` puts it below all that
eagle-trace writes in this process; `sitecustomize` (in `engine_site`) calls it in every process of a server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_trace import store, writer

FILE = "EAGLE_TRACE_TEST_DISK"
#: bytes that may wait to be written, instead of the writer's own: a small model fills no more
QUEUE = "EAGLE_TRACE_TEST_QUEUE"
HANG = "hang"


#: everything that writes
PLACES = [(store.Sink, "write"), *((store._LocalStore, name) for name in ("make", "create", "write", "remove", "sink"))]


def hook() -> None:
    """Let everything that writes pass the fault of the moment first."""
    writer.QUEUE_BYTES = int(os.environ.get(QUEUE, writer.QUEUE_BYTES))
    for owner, name in PLACES:
        setattr(owner, name, behind(getattr(owner, name)))


def behind(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, behind what the disk does at the moment."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _suffer()
        return function(*args, **kwargs)

    return call


def _suffer() -> None:
    fault = Path(os.environ[FILE]).read_text().strip()
    if fault != HANG:
        time.sleep(float(fault or 0))
        return
    while Path(os.environ[FILE]).read_text().strip() == HANG:
        time.sleep(0.05)
