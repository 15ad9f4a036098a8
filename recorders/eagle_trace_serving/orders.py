"""What a server's main process orders of the recorder in each process that runs the draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_trace.capture import LEVELS
from eagle_trace.errors import UsageError
from eagle_trace.patience import check_wait
from eagle_trace.selection import Selection
from eagle_trace_serving.admission import Admission


@dataclass(frozen=True)
class Order:
    """One recording.

    Attributes:
        out: place of the trace.
        admission: which requests to take.
        level: how much to keep of each row.
        max_bytes: stop recording, not the server, after so many bytes.
        selection: which sites and rows to keep.
        alone: seal as soon as the last request ended; otherwise wait to be told.
        lease: seal when nobody asked how it goes for so many seconds: whoever was to end it is gone. None for never.
        keep_cuda_graphs: let the server replay its CUDA graphs, and record at their boundaries only.
        seconds: seal after so long, whatever is still going on; None for no limit.
        max_wait: how long the server may wait for the disk, in all [s]; None for what the server was started with.
        settings: what else the manifest should say was asked for.
        changes: what was changed about the server to record it, one sentence each.
        argv: command line, for the manifest.
        keep_empty: keep a trace in which there is no row; otherwise it is removed when the recording ends.
    """

    out: str
    admission: Admission = field(default_factory=Admission)
    level: str = "values"
    max_bytes: int | None = None
    selection: Selection = field(default_factory=Selection)
    alone: bool = True
    lease: float | None = None
    keep_cuda_graphs: bool = False
    seconds: float | None = None
    max_wait: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    keep_empty: bool = True

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {self.level!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"the byte budget must be positive, not {self.max_bytes}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"the time limit must be a positive number of seconds, not {self.seconds}")
        if self.max_wait is not None:
            check_wait(self.max_wait)
