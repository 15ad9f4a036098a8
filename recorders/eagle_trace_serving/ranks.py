"""The recorders of a server, one in each process that runs the draft: who they are, and what they say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from eagle_trace_serving.environment import SESSION
from eagle_trace_serving.host import Facts
from eagle_trace_serving.session import Message, Outbox, Session

#: how long it takes to listen to a recorder that has just connected
LISTEN_SECONDS = 0.1


class Rank:
    """The recorder in one process that runs the draft."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outbox = Outbox(connection)
        self.facts: Facts | None = None
        #: what it said of the recording that is going on
        self.said: dict[str, tuple[Any, ...]] = {}
        #: it was asked for its counts and has not answered yet
        self.asked = False
        self.alive = True

    @property
    def ended(self) -> bool:
        """Whether it does nothing more for the recording that is going on."""
        return "sealed" in self.said or "failed" in self.said


class Ranks:
    """Listens to the recorders, in a thread of its own, and tells them what to do.

    Args:
        hear: called with a rank and what it says of a recording, while `changed` is held.

    Attributes:
        changed: notified with everything that a recorder says.
        all: who has connected; in the order of their ranks as soon as they have said which they are.
    """

    def __init__(self, hear: Callable[[Rank, Message], None]) -> None:
        self._hear = hear
        self._session = Session(SESSION)
        self._closed = threading.Event()
        self.changed = threading.Condition()
        self.all: list[Rank] = []
        threading.Thread(target=self._listen, name="eagle-trace-control", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that the server starts need in their environment to find this one."""
        return self._session.environment

    def close(self) -> None:
        """Let go of all of them."""
        self._closed.set()
        self._session.close()

    @property
    def facts(self) -> list[Facts]:
        """Facts of those that have reported, by rank."""
        return [rank.facts for rank in self.all if rank.facts is not None]

    @property
    def armed(self) -> bool:
        """Whether every one that there is to be has reported."""
        facts = self.facts
        return bool(facts) and len(facts) >= facts[0].ranks * facts[0].replicas

    def all_said(self, name: str) -> bool:
        """Whether each of them has said that of the recording that is going on, or does nothing more for it."""
        said = [name in rank.said or rank.ended for rank in self.all]
        return all(said) and bool(said)

    def tell(self, message: bytes) -> None:
        """Tell those that live."""
        for rank in self.all:
            if rank.alive:
                rank.outbox.put(message)

    def wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until what they say makes a condition true; whether it is within so many seconds."""
        with self.changed:
            return self.changed.wait_for(condition, seconds)

    def _listen(self) -> None:
        """Take in what they say until the process ends."""
        while not self._closed.is_set():
            try:
                sources: list[Any] = [self._session, *(rank.connection for rank in self.all if rank.alive)]
                ready: list[Any] = wait(sources, timeout=LISTEN_SECONDS)
                if self._session in ready:
                    ready.remove(self._session)
                    # not here: somebody who says nothing must not make this one deaf
                    greet = partial(self._greet, self._session.accept())
                    threading.Thread(target=greet, name="eagle-trace-greeting", daemon=True).start()
            except (OSError, ValueError):
                return  # closed under our hands
            for source in ready:
                rank = next(rank for rank in self.all if rank.connection is source)
                try:
                    message: Message = rank.connection.recv()
                except (EOFError, OSError):
                    rank.alive = False
                    message = ("failed", None, "the scheduler process ended", "", 0.0)
                self._take(rank, message)

    def _greet(self, connection: Connection) -> None:
        if self._session.greet(connection):
            rank = Rank(connection)
            with self.changed:
                self.all.append(rank)

    def _take(self, rank: Rank, message: Message) -> None:
        with self.changed:
            rank.asked &= message[0] != "counts"
            if message[0] == "armed":
                rank.facts = message[1]
                self.all.sort(key=lambda one: 0 if one.facts is None else one.facts.rank)
            else:
                self._hear(rank, message)
            self.changed.notify_all()
