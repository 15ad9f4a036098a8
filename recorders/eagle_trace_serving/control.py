"""Recording, seen from the server's main process: starts and ends it wherever the draft runs, and knows how it went.

One `Control` lives in the process that owns the server (HTTP) or the engine. It is made by the plugin, before the
server starts the processes that run the draft, which find it through their environment.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import secrets
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from eagle_trace.errors import HostError, RecordingError, UsageError
from eagle_trace.patience import FOLDER_SECONDS, MAX_WAIT, leave_behind, within
from eagle_trace.recording.hosts import Host
from eagle_trace.store import as_place, join, open_store, reason
from eagle_trace.writer import prepare_output, remove_empty
from eagle_trace_serving.described import server_manifest, silent_recorder, told
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.ranks import Rank, Ranks
from eagle_trace_serving.session import Message, packed

#: how long after the server is ready its recorders may take to report; they do so before that, unless they never loaded
ARM_SECONDS = 10.0
#: how long a recorder may take to begin, and to write its seal
BEGIN_SECONDS = 60.0
SEAL_SECONDS = 600.0
#: how long a server that is shut down may take to seal
CLOSE_SECONDS = 4.0
#: how long a recorder may take to say what it has counted, before what it said last is told again
COUNT_SECONDS = 0.5
WATCH_SECONDS = 0.2
REMOVE_SECONDS = 2.0
#: recordings of which it is still known how they ended
MOST_OUTCOMES = 64

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One recording: what was ordered, and what came of it (None as long as it goes on)."""

    number: int
    order: Order
    outcome: dict[str, Any] | None = None
    #: every recorder has its hooks in place: what comes from now on is recorded
    begun: bool = False
    #: the recorders were told to end it
    called_off: bool = False


class Control:
    """Starts and ends recordings. Every method may be called from any thread; one recording runs at a time.

    No lock is held while anybody waits, and every wait has an end: whatever fails while a recording begins or ends, the
    next one may be tried.

    Args:
        host: the server's program.
        max_wait: how long the server may wait for the disk in one recording, in all [s].
    """

    def __init__(self, host: Host, max_wait: float = MAX_WAIT) -> None:
        self._name, self._title = host.name, host.title
        self._max_wait = max_wait
        self._numbers = itertools.count(1)
        self._run: Run | None = None
        self._last: dict[str, Any] = {}
        self._removing: threading.Thread | None = None
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._closing = False
        self._closed = threading.Event()
        self._renewed = 0.0
        self._ranks = Ranks(self._hear)
        self._changed = self._ranks.changed
        atexit.register(self.close)

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that the server starts need in their environment to find this one."""
        return self._ranks.environment

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Seal what is being recorded, in at most so many seconds, and let go of the recorders."""
        with self._changed:
            first, self._closing = not self._closing, True
            self._changed.notify_all()
        if not first:
            self._closed.wait(seconds)
            return
        deadline = time.monotonic() + seconds
        try:
            self.finish(stopped="the server ended", seconds=seconds)
        except (RecordingError, UsageError) as error:
            logger.error("eagle-trace: %s", error)  # noqa: TRY400 (a sentence, not a bug)
        finally:
            self._wait_until_removed(deadline)
            self._closed.set()
            self._ranks.close()

    # ---- orders -----------------------------------------------------------------------------------------------

    def wait_until_armed(self) -> list[Facts]:
        """Facts of every recorder, by rank.

        Raises:
            HostError: they do not report; call it when the server is ready, they should have by then.
        """
        if not self._ranks.wait(lambda: self._ranks.armed, ARM_SECONDS):
            raise HostError(silent_recorder(self._title))
        return self._ranks.facts

    def start(self, order: Order) -> None:
        """Begin to record. Returns when every recorder has its hooks in place.

        Raises:
            UsageError: a recording is going on, or what was asked for cannot be written down.
            OutputExistsError: `order.out` is taken.
            HostError: a scheduler process is gone.
            RecordingError: a recorder cannot begin, or the folder does not answer.
        """
        self._refuse_second()
        facts = self.wait_until_armed()
        order = order if order.max_wait is not None else replace(order, max_wait=self._max_wait)
        manifest = server_manifest(order, facts[0])
        run = Run(next(self._numbers), order)
        begin = packed(("begin", run.number, order, manifest))
        with self._changed:
            self._refuse_second()
            if not all(rank.alive for rank in self._ranks.all):
                raise HostError(f"{self._title}'s process with the draft ended: nothing can be recorded any more")
            self._run = run
            for rank in self._ranks.all:
                rank.said, rank.asked = {}, False
        try:
            within(FOLDER_SECONDS, partial(prepare_output, as_place(order.out)), order.out)
            self._ranks.tell(begin)
            if not self._ranks.wait(
                lambda: run.outcome is not None or self._ranks.all_said("recording"), BEGIN_SECONDS
            ):
                raise RecordingError(f"the recorder did not begin within {BEGIN_SECONDS:.0f} s")  # noqa: TRY301
            self._raise_failure(run.outcome)
            run.begun = True
        except BaseException as error:
            self._give_up(run, error)
            raise
        if order.seconds is not None or order.lease is not None:
            self.renew()
            threading.Thread(target=self._watch, args=(run,), name="eagle-trace-watch", daemon=True).start()

    def _refuse_second(self) -> None:
        run = self._run
        if self._closing:
            raise HostError("the server is being shut down: nothing can be recorded any more")
        if run is not None:
            raise UsageError(
                f"{run.order.out} is being recorded: wait for it, or end it with POST /eagle_trace/finish "
                "(a server started with EAGLE_TRACE_REQUESTS=0 records only when asked)"
            )

    def renew(self) -> None:
        """Somebody waits for the recording that is going on."""
        self._renewed = time.monotonic()

    @property
    def state(self) -> str:
        """``starting``, ``ready`` or ``recording``; asks nobody.

        A recording that is being begun is ``starting``, too: a request that comes before it is ``recording`` may be
        none of it.
        """
        run = self._run
        if run is None:
            return "ready" if self._ranks.armed else "starting"
        return "recording" if run.begun else "starting"

    @property
    def recording_into(self) -> str | None:
        """Place of the recording that is going on."""
        run = self._run
        return run.order.out if run is not None else None

    @property
    def last(self) -> dict[str, Any]:
        """How the last recording ended."""
        return self._last

    @property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """How the last recordings ended, by place, the newest last."""
        with self._changed:
            return dict(self._outcomes)

    def finish(
        self,
        settings: dict[str, Any] | None = None,
        stopped: str | None = None,
        seconds: float = SEAL_SECONDS,
        only: str | None = None,
    ) -> str | None:
        """End the recording that is going on, and return the trace's place; None if nothing was.

        Args:
            settings: added to the manifest's.
            stopped: why it ends before its requests did; noted only if some did not.
            seconds: how long to wait for the seal; then the recording is given up.
            only: end nothing but the recording into this place.

        Raises:
            UsageError: `settings` cannot be written down; the recording goes on.
            RecordingError: a recorder failed, or is not done in time.
        """
        run = self._run
        if run is None or only not in (None, run.order.out):
            return None
        given, deadline = settings or {}, time.monotonic() + seconds
        self._ranks.tell(packed(("finish", run.number, given, stopped)))
        run.called_off = True
        if not self._ranks.wait(lambda: run.outcome is not None, seconds):
            self._give_up(run, RecordingError(f"{run.order.out} was not sealed within {seconds:g} s"))
        self._wait_until_removed(deadline)
        self._raise_failure(run.outcome)
        return run.order.out

    def status(self) -> dict[str, Any]:
        """``state`` (starting, ready, recording), place and counts of the recording, and how the last one ended."""
        run, last = self._run, self._last
        facts = self._ranks.facts[0] if self._ranks.armed else None
        return {
            "host": self._name,
            "state": self.state,
            "out": run.order.out if run is not None else None,
            **(self._counts(run) if run is not None else {}),
            "last": last,
            "server": {} if facts is None else told(facts),
        }

    def _counts(self, run: Run) -> dict[str, int]:
        """What the first rank has counted; a recorder that does not answer at once said this last."""
        rank = self._ranks.all[0]
        before = rank.said.get("counts")
        if rank.alive and not rank.asked:
            rank.asked = True
            rank.outbox.put(packed(("counts", run.number)))
        self._ranks.wait(lambda: rank.said.get("counts") is not before or run.outcome is not None, COUNT_SECONDS)
        counts: dict[str, int] = rank.said.get("counts", ({},))[0]
        return counts

    def _raise_failure(self, outcome: dict[str, Any] | None) -> None:
        if outcome is not None and outcome.get("outcome") == "failed":
            words = [f"the recording failed, {self._title} did not: {outcome['why']}", outcome["detail"]]
            raise RecordingError("\n".join(part for part in words if part))

    def wait_until_ended(self, seconds: float | None = None) -> bool:
        """Wait until no recording is going on; False if one still is after so many seconds."""
        return self._ranks.wait(lambda: self._run is None, seconds)

    def _wait_until_removed(self, deadline: float) -> None:
        """Wait for the removal of a trace without rows, but not for a disk that hangs."""
        if self._removing is not None:
            self._removing.join(max(0.0, min(REMOVE_SECONDS, deadline - time.monotonic())))

    def _watch(self, run: Run) -> None:
        """End a recording whose time is up, or whose client went away."""
        started = time.monotonic()
        why = None
        while why is None:
            if self._ranks.wait(lambda: run.outcome is not None, WATCH_SECONDS):
                return
            now = time.monotonic()
            if run.order.seconds is not None and now - started >= run.order.seconds:
                why = f"time limit ({run.order.seconds:g} s)"
            elif run.order.lease is not None and now - self._renewed >= run.order.lease:
                why = "its client went away"
        with contextlib.suppress(RecordingError):  # kept in the status
            self.finish(stopped=why)

    def _give_up(self, run: Run, error: BaseException) -> None:
        """End a recording that does not begin or end as it should: the next one may be tried."""
        self._ranks.tell(packed(("finish", run.number, {}, "it was given up")))
        with self._changed:
            if run.outcome is None:
                self._close_run(run, {"outcome": "failed", "why": str(error) or type(error).__name__, "detail": ""})

    def _close_run(self, run: Run, outcome: dict[str, Any]) -> None:
        run.outcome = self._last = self._outcomes[run.order.out] = {"out": run.order.out, **outcome}
        for old in list(self._outcomes)[:-MOST_OUTCOMES]:
            del self._outcomes[old]
        if not run.order.keep_empty and outcome.get("rows") == 0:
            run.outcome["removed"] = "no row was recorded, so nothing is kept"
            # not here: a disk that hangs must not keep anybody from being heard
            self._removing = threading.Thread(
                target=_remove, args=(run.order.out,), name="eagle-trace-remove", daemon=True
            )
            self._removing.start()
            leave_behind(self._removing)
        if self._run is run:
            self._run = None
        self._changed.notify_all()

    # ---- what the recorders say -------------------------------------------------------------------------------

    def _hear(self, rank: Rank, message: Message) -> None:
        name, number, *said = message
        run = self._run
        # what a recorder says of a recording that was given up, or that it has ended already, nobody waits for
        if run is not None and number in (None, run.number) and not rank.ended:
            rank.said[name] = tuple(said)
            self._settle(run)

    def _settle(self, run: Run) -> None:
        """End a recording that has ended on every rank; one that has ended on some ends on the others, too."""
        if not any(rank.ended for rank in self._ranks.all):
            return
        failures = [rank.said["failed"] for rank in self._ranks.all if "failed" in rank.said]
        stopped = next(
            (why for rank in self._ranks.all if (why := rank.said.get("sealed", ({},))[0].get("stopped"))), None
        )
        if not all(rank.ended for rank in self._ranks.all) and not run.called_off:
            run.called_off = True
            why = "another rank failed" if failures else stopped
            self._ranks.tell(packed(("finish", run.number, {}, why)))
        if failures:
            why, detail, _ = failures[0]
            waited = max(seconds for *_, seconds in failures)
            self._close_run(run, {"outcome": "failed", "why": why, "detail": detail, "waited_seconds": waited})
        elif all(rank.ended for rank in self._ranks.all):
            sealed = [rank.said["sealed"][0] for rank in self._ranks.all]
            # every rank writes files of its own
            written = {name: sum(one.get(name, 0) for one in sealed) for name in ("bytes", "files")}
            waited = max(one.get("waited_seconds", 0.0) for one in sealed)
            ended = {"stopped": stopped, "waited_seconds": waited}
            self._close_run(run, {"outcome": "sealed", **sealed[0], **written, **ended})


def _remove(place: str) -> None:
    """Take away a trace in which nothing is."""
    try:
        open_store(as_place(place)).clear()
        remove_empty(as_place(place))
    except (OSError, UsageError) as error:
        logger.error("eagle-trace: %s holds no row and could not be removed: %s", place, reason(error))  # noqa: TRY400


def next_place(folder: str) -> str:
    """A place below `folder`, or below a URL, that no trace has yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return join(as_place(folder), f"{stamp}-{secrets.token_hex(2)}.trace")
