"""How long anybody waits for a disk: as long as was said beforehand, whatever the disk does.

A call into a filesystem that hangs cannot be ended, only left behind in a thread of its own. Such threads are daemons,
so that they keep no process alive, and there are never more than a few of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from eagle_trace.errors import RecordingError, UsageError

Result = TypeVar("Result")

#: how long a host waits for the disk, in all, while one recording lasts [s]
MAX_WAIT = 0.2
#: how long a folder may take to say what it holds [s]
FOLDER_SECONDS = 10.0
#: how many calls that hang may be left behind before no further one is made
_MOST_LEFT_BEHIND = 4

_left_behind: list[threading.Thread] = []


def refuse_one_more(place: object) -> None:
    """Raises RecordingError where so many threads wait for their disk already that `place` is not touched, too."""
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    if len(_left_behind) >= _MOST_LEFT_BEHIND:
        raise RecordingError(f"{place} is not touched: {len(_left_behind)} earlier attempts still wait for their disk")


def leave_behind(thread: threading.Thread) -> None:
    """Count a thread that nobody waits for any more, and which holds a little memory until its disk answers."""
    if thread not in _left_behind:
        _left_behind.append(thread)


def within(seconds: float, work: Callable[[], Result], place: object) -> Result:
    """What `work` returns, or raises, if it does so within `seconds`; else it is left behind.

    Args:
        seconds: how long to wait.
        work: touches the disk.
        place: what it touches, for messages.

    Raises:
        RecordingError: it takes longer, or too many others still hang.
    """
    refuse_one_more(place)
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 (raised below, in the thread that asked)
            errors.append(error)

    thread = threading.Thread(target=run, name="eagle-trace-disk", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    leave_behind(thread)
    raise RecordingError(f"{place} did not answer within {seconds:g} s: does its disk hang?")


def parse_wait(text: str, name: str) -> float:
    """Seconds that a host may wait in all, as a variable says them; ``inf`` for no limit.

    Raises:
        UsageError: not a number of 0 or more.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"{name} must be a number of seconds such as 0.2, not {text[:40]!r}")
    return seconds


def check_wait(seconds: float) -> None:
    """Raises UsageError unless `seconds` is 0 or more."""
    if not seconds >= 0:
        raise UsageError(f"the longest wait must be 0 seconds or more, not {seconds}")
