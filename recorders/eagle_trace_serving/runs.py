"""What a server's main process keeps of one recording, and of the recorder in each process that runs the draft."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.session import Outbox


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
