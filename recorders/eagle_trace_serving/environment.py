"""Environment variables of a server that can be recorded. Imports nothing: plugins read these in every process."""

from __future__ import annotations

PREFIX = "EAGLE_TRACE_"
#: where traces go: set by the user, or by `record` for the server it starts
OUT = "EAGLE_TRACE_OUT"
#: without a key, let everybody who reaches the server record, fetch and remove everything
RECORD_OTHERS = "EAGLE_TRACE_RECORD_OTHERS"
#: where a process that runs the draft finds the server's main process
SESSION = "EAGLE_TRACE_SESSION"
#: set by `record` for the server it starts: who has the server's key says where a trace goes, and how large it gets
OWN = "EAGLE_TRACE_OWN"

#: which requests to record, each behind PREFIX; what to keep of them is said as `Wanted` has it
WHICH = ("REQUESTS", "MATCH", "SAMPLE")


def variables() -> set[str]:
    """Every variable by which a user says what a server is to record."""
    from eagle_trace.recording.wanted import NAMES

    return {OUT, RECORD_OTHERS, OWN, *(PREFIX + name for name in (*WHICH, *map(str.upper, NAMES)))}
