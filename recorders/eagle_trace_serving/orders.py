"""What a server's main process orders of the recorder in each process that runs the draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_trace.recording.wanted import Wanted
from eagle_trace_serving.admission import Admission


@dataclass(frozen=True)
class Order(Wanted):
    """One recording: what to keep, and of which requests.

    Attributes:
        out: place of the trace.
        admission: which requests to take.
        alone: seal as soon as the last request ended; otherwise wait to be told.
        lease: seal when nobody asked how it goes for so many seconds: whoever was to end it is gone. None for never.
        settings: what else the manifest should say was asked for.
        changes: what was changed about the server to record it, one sentence each.
        argv: command line, for the manifest.
        keep_empty: keep a trace in which there is no row; otherwise it is removed when the recording ends.
    """

    out: str
    admission: Admission = field(default_factory=Admission)
    alone: bool = True
    lease: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    keep_empty: bool = True
