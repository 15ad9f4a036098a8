"""The recorder where the draft runs: hangs its hooks when it is ordered to, and takes them off again.

The scheduler's thread runs the hooks; a second thread takes orders from the server's main process. Beginning, sealing
and sending have threads of their own, so that neither of the two ever waits for a disk or for another process.

Under tensor parallelism each rank has one of these. All are given the same orders and see the same calls, so their rows
are the same without a word between them.

Whatever goes wrong here ends the recording, is reported, and never reaches the server.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from eagle_trace.errors import EagleTraceError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.store import as_place
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.batches import ServedRequest
from eagle_trace_serving.environment import SESSION
from eagle_trace_serving.host import DraftWorker
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording
from eagle_trace_serving.session import Outbox, connect, packed

#: how long a rank that is behind may take to record what rank 0 has recorded
CATCH_UP_SECONDS = 30.0
#: how long a process that ends may take to seal: of the 5 s that are promised, the rest is for all else
LEAVE_SECONDS = 3.0


@dataclass
class _Active:
    """The recording that is going on, under the number that the main process gave it, and its hooks."""

    number: int
    recording: Recording
    hooks: Hooks


class ServeRecorder:
    """Records the draft it is attached to, one recording after the other."""

    def __init__(self, draft: DraftWorker, connection: Connection) -> None:
        self._draft = draft
        self._connection = connection
        self._outbox = Outbox(connection)
        # held for moments: by whoever takes the recording that is going on, or puts it there
        self._turn = threading.Lock()
        self._active: _Active | None = None
        #: the recording ordered last, and how it was told to end before it had begun
        self._number = 0
        self._early: tuple[dict[str, Any], str | None] | None = None
        self._ending: list[threading.Thread] = []
        self._reading = threading.Lock()
        self._loaded: list[dict[str, Any]] | None = None

    @classmethod
    def attach(cls, draft: DraftWorker) -> ServeRecorder:
        """Connect to the server's main process, report what was found, and wait for orders in a thread of its own."""
        import pandas  # noqa: F401 (pyarrow imports it with its first array: not while the first recording runs)

        connection = connect("recorder", SESSION)
        if connection is None:
            raise RuntimeError("armed without a session")
        recorder = cls(draft, connection)
        recorder._say("armed", draft.facts())
        # processes that multiprocessing starts run these and no atexit functions
        Finalize(None, recorder._leave, exitpriority=10)
        threading.Thread(target=recorder._obey, name="eagle-trace-orders", daemon=True).start()
        return recorder

    # ---- what the scheduler does, told by the plugin's hooks --------------------------------------------------

    def arrived(self, request: ServedRequest) -> None:
        """A request was queued."""
        self.tell(Recording.arrived, request)

    def ended(self, rid: str) -> None:
        """A request was answered or aborted; with the last one the hooks come off."""
        self.tell(Recording.ended, rid)

    def tell(self, event: Callable[..., Any], *given: Any) -> None:
        """Pass an event to the recording that is going on, if there is one; an error ends it and not the server.

        Args:
            event: a method of `Recording`, or a function that takes one.
            given: what else it takes.
        """
        active = self._active
        if active is None:
            return
        try:
            event(active.recording, *given)
        except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
            self._fail(active, error)

    def fail(self, error: BaseException) -> None:
        """What told this recorder of the server went wrong: end the recording that is going on."""
        active = self._active
        if active is not None:
            self._fail(active, error)

    def between_batches(self) -> None:
        """No forward is running: take the hooks off if nothing is left to record."""
        active = self._active
        if active is not None and active.recording.done:
            active.hooks.remove()
            if active.recording.order.alone:
                self._end(active, {}, None)

    # ---- orders -----------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Take orders until the server's main process is gone; none of them is carried out in this thread."""
        while True:
            try:
                name, number, *arguments = self._connection.recv()
            except (EOFError, OSError):
                # keep what there is while this process still lives
                self._leave()
                return
            except Exception as error:  # noqa: BLE001 (an order that cannot be read is no reason to be deaf)
                self._say_failed(None, error)
                continue
            if name == "counts":
                active = self._active
                self._say("counts", number, active.recording.counts if active is not None else {})
            elif name == "begin":
                with self._turn:
                    self._number, self._early = number, None
                self._start(self._begin, number, *arguments)
            elif number == self._number:
                self._start(self._finish, number, *arguments)

    def _start(self, order: Callable[..., None], number: int, *arguments: Any) -> None:
        def obey() -> None:
            try:
                order(number, *arguments)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._say_failed(number, error)

        threading.Thread(target=obey, name=f"eagle-trace{order.__name__}", daemon=True).start()

    def _begin(self, number: int, order: Order, manifest: Manifest) -> None:
        manifest.rank = manifest.tp_rank = self._draft.rank
        manifest.ranks = self._draft.ranks
        writer = TraceWriter(as_place(order.out), manifest, max_bytes=order.max_bytes, max_wait=order.max_wait)
        hooks = Hooks(partial(self._guarded, number))
        try:
            for row in self._params():
                writer.put_record("params", row)
            recording = self._draft.recording(order, writer)
            self._draft.hang(hooks, recording)
        except Exception as error:
            hooks.remove()
            writer.abort(error)
            raise
        active = _Active(number, recording, hooks)
        with self._turn:
            called_off = self._early if number == self._number else ({}, "it was given up")
            if called_off is None:
                self._active = active
        if called_off is None:
            self._say("recording", number)
        else:
            hooks.remove()
            self._seal(active, *called_off)

    def _guarded(self, number: int, function: Callable[..., None]) -> Callable[..., None]:
        """A hook that calls `function` while a recording goes on; an error ends the recording and not the server."""

        def hook(*given: Any) -> None:
            active = self._active
            if active is None or active.number != number:
                return
            try:
                function(*given)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._fail(active, error)

        return hook

    def _params(self) -> list[dict[str, Any]]:
        with self._reading:
            if self._loaded is None:  # read once: a server's weights stay what they are
                self._loaded = list(self._draft.params())
            return self._loaded

    def _finish(self, number: int, settings: dict[str, Any], stopped: str | None) -> None:
        with self._turn:
            active = self._active
            if active is None or active.number != number:
                # it has not begun yet, or ended by itself and said so
                self._early = (settings, stopped)
                return
        if stopped is None:
            self._catch_up(active.recording)
        active.hooks.remove()
        self._end(active, settings, None if active.recording.done else stopped)

    def _catch_up(self, recording: Recording) -> None:
        """Wait until this rank has come as far as rank 0, whose answers come before other ranks are done."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while self._draft.rank and not recording.done and time.monotonic() < deadline:
            time.sleep(0.01)

    def _leave(self) -> None:
        """This process ends, or the server's main process did: seal in a few seconds what there is."""
        deadline = time.monotonic() + LEAVE_SECONDS
        active = self._active
        if active is not None:
            active.hooks.remove()
            self._end(active, {}, "the server ended")
        for thread in list(self._ending):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._outbox.flush(deadline - time.monotonic())

    # ---- the end of a recording -------------------------------------------------------------------------------

    def _claim(self, active: _Active) -> bool:
        """Take the recording that is going on, unless somebody else was faster."""
        with self._turn:
            mine = self._active is active
            if mine:
                self._active = None
        return mine

    def _end(self, active: _Active, settings: dict[str, Any], stopped: str | None) -> None:
        """Seal in a thread of its own: the scheduler must not wait for the disk."""
        if self._claim(active):
            seal = threading.Thread(
                target=self._seal, args=(active, settings, stopped), name="eagle-trace-seal", daemon=True
            )
            self._ending = [thread for thread in self._ending if thread.is_alive()] + [seal]
            seal.start()

    def _seal(self, active: _Active, settings: dict[str, Any], stopped: str | None) -> None:
        try:
            active.recording.seal(settings, stopped)
        except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
            self._say_failed(active.number, error, active.recording.writer.waited)
        else:
            self._say("sealed", active.number, active.recording.outcome)

    def _fail(self, active: _Active, error: BaseException) -> None:
        if self._claim(active):
            active.hooks.remove()
            threading.Thread(
                target=active.recording.abort, args=(error,), name="eagle-trace-abort", daemon=True
            ).start()
            self._say_failed(active.number, error, active.recording.writer.waited)

    def _say_failed(self, number: int | None, error: BaseException, waited: float = 0.0) -> None:
        self._say("failed", number, *_words(error), waited)

    def _say(self, *message: Any) -> None:
        self._outbox.put(packed(message))


def _words(error: BaseException) -> tuple[str, str]:
    """What went wrong, and the traceback of what should not have happened."""
    expected = isinstance(error, EagleTraceError | OSError)
    return str(error) or type(error).__name__, "" if expected else "".join(traceback.format_exception(error))
