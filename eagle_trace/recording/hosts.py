"""Which hosts can be recorded here: their packages register themselves as entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from eagle_trace.errors import UsageError

ENTRY_POINTS = "eagle_trace.recorders"


def find_recorder(mode: str) -> Callable[..., Any]:
    """The recorder registered for `mode` (``train``, ``serve``) in the entry-point group `eagle_trace.recorders`.

    Raises:
        UsageError: nobody registered one, or what it needs is not installed.
    """
    found = entry_points(group=ENTRY_POINTS)
    for entry in found:
        if entry.name == mode:
            try:
                recorder: Callable[..., Any] = entry.load()
            except ModuleNotFoundError as error:
                raise UsageError(
                    f"recording the {mode} side needs {error.name}: pip install 'eagle-trace[{mode}]'"
                ) from error
            return recorder
    raise UsageError(f"no recorder for mode {mode!r}; installed: {', '.join(sorted(found.names)) or 'none'}")
