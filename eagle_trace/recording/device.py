"""Where a draft is run, from what was asked for; whoever runs it asks torch, nothing here does."""

from __future__ import annotations

from collections.abc import Callable

from eagle_trace.errors import HostError, UsageError

DEVICES = ("auto", "cpu", "cuda")


def device_for(asked: str, has_cuda: Callable[[], bool]) -> str:
    """``cpu`` or ``cuda`` for what ``--device`` asks for; to be called before anything is loaded or started.

    Args:
        asked: ``auto``, ``cpu`` or ``cuda``.
        has_cuda: whether a CUDA device can be used here; not called where a CPU was asked for.

    Raises:
        UsageError: it is another device.
        HostError: CUDA was asked for and is not there.
    """
    if asked not in DEVICES:
        raise UsageError(f"--device must be auto, cpu or cuda, not {asked!r}")
    if asked == "cpu" or not has_cuda():
        if asked == "cuda":
            raise HostError("there is no CUDA device here: use --device cpu")
        return "cpu"
    return "cuda"
