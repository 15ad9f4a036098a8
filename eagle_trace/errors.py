"""Every error that eagle-trace raises on purpose, as one tree.

    EagleTraceError                 status 2
    ├── UsageError                  the command line or an argument does not make sense
    ├── PromptsError                a prompts file cannot be read
    ├── CheckpointError             a target or draft folder is not what the command needs
    ├── TraceError                  a trace cannot be read
    │   ├── TraceNotFoundError      nothing there, or no trace
    │   ├── TraceUnsealedError      recording was not finished
    │   ├── TraceVersionError       written by another format version
    │   └── TraceDamagedError       a file is missing, truncated or altered
    ├── RecordingError              the recording failed (the host did not)
    │   ├── OutputExistsError       the output folder is taken
    │   └── HostError               the host could not be started or died
    ├── SchedulerError              the Dask cluster of `diff --scheduler` does not answer or fails
    └── IncomparableError           two traces have nothing (or too little) in common

The message is one sentence that names the way out; the command line prints it without a traceback and exits with
``exit_status``. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class EagleTraceError(Exception):
    """Base of all errors raised on purpose."""

    exit_status = 2


class UsageError(EagleTraceError):
    """The command line or an argument does not make sense."""


class PromptsError(EagleTraceError):
    """A prompts file cannot be read."""


class CheckpointError(EagleTraceError):
    """A target or draft folder is not what the command needs."""


class TraceError(EagleTraceError):
    """A trace cannot be read."""


class TraceNotFoundError(TraceError):
    """There is no trace at the path."""


class TraceUnsealedError(TraceError):
    """The recording was not finished: there is no seal."""


class TraceVersionError(TraceError):
    """The trace was written in another format version."""


class TraceDamagedError(TraceError):
    """A file of a sealed trace is missing, truncated or altered."""


class RecordingError(EagleTraceError):
    """The recording failed. The host did not."""


class OutputExistsError(RecordingError):
    """The output folder already holds something."""


class HostError(RecordingError):
    """The host (SGLang, speculators) could not be started or died."""


class SchedulerError(EagleTraceError):
    """The Dask cluster that was to run the comparison does not answer, or fails."""


class IncomparableError(EagleTraceError):
    """Two traces have nothing, or too little, in common."""


class Terminated(KeyboardInterrupt):
    """A SIGTERM to the command line, which unwinds as Ctrl-C does: hosts are ended, temporary folders go."""
