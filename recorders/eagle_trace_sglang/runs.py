"""What SGLang's main process keeps of one recording, and of the recorder in each scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from eagle_trace.errors import UsageError
from eagle_trace_sglang.orders import Order
from eagle_trace_sglang.session import Message, Outbox, packed


class Rank:
    """The recorder in one scheduler process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outbox = Outbox(connection)
        self.facts: dict[str, Any] = {}
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
    #: the recorders were told to end it
    called_off: bool = False


def checked(message: Message, written: Callable[[], object]) -> bytes:
    """A message as it is sent, once it is known that its manifest can be `written`.

    Raises:
        UsageError: it cannot, or it cannot be sent.
    """
    try:
        written()
    except (RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"what was asked for cannot be written into a manifest ({type(error).__name__}): "
            "are its settings nested too deeply?"
        ) from error
    return packed(message)
