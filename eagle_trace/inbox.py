"""What a host hands over and the writer's thread takes: in order, in bounded memory, with a bound on the waiting.

What comes is taken in batches: a writer that wakes with every forward takes turns with the host's thread all the time,
and every turn costs both. The host waits only where the writer is too far behind, and never longer, in all, than it was
said to. Then the inbox is
**slow**: of the forward that is being handed over the rest is still taken, since its rows belong together and lie in
memory already; of any later forward nothing is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: (what it is, the thing, bytes, the forward it belongs to or None)
Message = tuple[str, Any, int, int | None]
#: what takes this part of the room waits for no more
_MUCH = 16


class Inbox:
    """A queue between the host's threads and the writer's.

    Args:
        room: bytes that may wait to be written; one thing larger than that still gets through, alone.
        max_wait: seconds that the host may wait in all; None for no limit.
        stall: seconds after which a writer that gets nothing done is taken to hang.
        linger: seconds that what comes may wait for more of it, unless there is much already.
        clock: monotonic seconds.

    Attributes:
        slow: whether the writer was too far behind for too long: no further forward is taken.
        waited: how long the host has waited so far, in all [s].
    """

    def __init__(
        self,
        room: int,
        max_wait: float | None,
        stall: float,
        clock: Callable[[], float] = time.monotonic,
        linger: float = 0.0,
    ) -> None:
        self._room, self._stall, self._clock, self._linger = room, stall, clock, linger
        #: what waits is to be taken now
        self._pressing = False
        self._left = float("inf") if max_wait is None else max_wait
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._pending = 0
        self._last = -1
        self._moved = clock()
        self._closed = False
        self._finished = False
        self.slow = False
        self.waited = 0.0

    # ---- the host's side --------------------------------------------------------------------------------------

    def put(self, kind: str, item: Any, size: int, call: int | None = None, *, pressing: bool = False) -> bool:
        """Hand over `size` bytes that belong to forward `call` (numbers only grow), if to one; whether it was taken.

        A `pressing` thing waits for no more to come, nor does what is before it.
        """
        with self._changed:
            if self._closed or (self.slow and self._is_later(call)):
                return False
            if not self.slow and not self._await_room(size):
                self.slow = True
                if self._closed or self._is_later(call):
                    return False
            if not self._pending:
                self._moved = self._clock()
            if call is not None:
                self._last = max(self._last, call)
            self._pending += size
            self._messages.append((kind, item, size, call))
            self._pressing = self._pressing or pressing or self._pending >= self._room // _MUCH
            if self._pressing or len(self._messages) == 1:
                self._changed.notify_all()
            return True

    @property
    def patience(self) -> float:
        """How long the host may still wait [s]."""
        return max(0.0, self._left)

    def spend(self, seconds: float) -> None:
        """Count `seconds` that the host has waited for the disk elsewhere."""
        self._left -= seconds
        self.waited += seconds

    def _is_later(self, call: int | None) -> bool:
        return call is not None and call > self._last

    def _await_room(self, size: int) -> bool:
        """Wait until there is room, or the thread has ended; False if that takes too long."""
        if not self._pending or self._pending + size <= self._room:
            return True
        started = self._clock()
        self._pressing = True
        self._changed.notify_all()
        try:
            while self._pending and self._pending + size > self._room and not self._closed:
                now = self._clock()
                limit = min(self._left - (now - started), self._stall - (now - self._moved))
                if limit <= 0:
                    return False
                self._changed.wait(min(limit, threading.TIMEOUT_MAX))
            return True
        finally:
            self.spend(self._clock() - started)

    def close(self) -> None:
        """Take nothing more; what is there is still written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Take nothing more, and forget what is there."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()

    def wait_until_finished(self, seconds: float | None, stall: float | None = None) -> bool:
        """Whether the writer's thread is done within `seconds`; not if it gets nothing done for `stall` seconds."""
        started = self._clock()
        stall = self._stall if stall is None else stall
        with self._changed:
            while not self._finished:
                now = self._clock()
                limit = stall - (now - max(self._moved, started))
                if seconds is not None:
                    limit = min(limit, seconds - (now - started))
                if limit <= 0:
                    return False
                self._changed.wait(min(limit, threading.TIMEOUT_MAX))
        return True

    # ---- the writer's side ------------------------------------------------------------------------------------

    def get(self, timeout: float | None) -> Message | None:
        """The next thing, None after the last one. Call `done` when it is written.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        with self._changed:
            if not self._messages:
                self._pressing = False
                if not self._changed.wait_for(lambda: self._messages or self._closed, timeout):
                    raise TimeoutError
                linger = self._linger if timeout is None else min(self._linger, timeout)
                self._changed.wait_for(lambda: self._pressing or self._closed, linger)
            return self._messages.popleft() if self._messages else None

    def done(self, size: int) -> None:
        """What `get` gave last, of `size` bytes, needs no memory any more."""
        with self._changed:
            self._pending -= size
            self._moved = self._clock()
            self._changed.notify_all()

    def beat(self) -> None:
        """The disk has taken something."""
        self._moved = self._clock()

    def finish(self) -> None:
        """The writer's thread has ended."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()
