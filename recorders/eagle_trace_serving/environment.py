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

#: what a user may say beside OUT and RECORD_OTHERS, each behind PREFIX
ASKED = (
    "REQUESTS",
    "MATCH",
    "SAMPLE",
    "LEVEL",
    "MAX_BYTES",
    "SECONDS",
    "SITES",
    "ROOTS",
    "STEPS",
    "KEEP_CUDA_GRAPHS",
    "MAX_WAIT",
)
VARIABLES = (OUT, RECORD_OTHERS, OWN, *(PREFIX + name for name in ASKED))
