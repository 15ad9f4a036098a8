"""How processes of one machine talk: a Unix socket, and one message at a time.

A server's main process listens for the **recorder** in each process that runs the draft. A message is a tuple whose
first element names it. A connection that ends is a process that died, so nobody waits for a host that is gone.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import threading
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from typing import Any

from eagle_trace.errors import UsageError
from eagle_trace_serving.folders import OwnFolder

Message = tuple[Any, ...]
#: whoever connects says who it is within that time, for each message of it [s]
GREETING_SECONDS = 30


def packed(message: Message) -> bytes:
    """A message as it goes over a connection.

    Raises:
        UsageError: something in it cannot be sent, such as settings that are nested too deeply.
    """
    try:
        return bytes(ForkingPickler.dumps(message))
    except (pickle.PicklingError, RecursionError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"what was asked for cannot be handed to the processes that run the draft ({type(error).__name__}): "
            "are its settings nested too deeply?"
        ) from error


class Outbox:
    """Sends messages from a thread of its own: whoever has something to say never waits for the other end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._broken = False
        threading.Thread(target=self._run, name="eagle-trace-outbox", daemon=True).start()

    def put(self, message: bytes) -> None:
        """Send a message (see `packed`), if there is still somebody to hear it."""
        with self._changed:
            if not self._broken:
                self._messages.append(message)
                self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent; whether it is within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken or not self._messages, max(0.0, seconds))

    def _run(self) -> None:
        while not self._broken:
            with self._changed:
                self._changed.wait_for(lambda: self._messages)
                message = self._messages[0]
            try:
                self._connection.send_bytes(message)
            except (OSError, ValueError):
                self._broken = True  # nobody left to hear it
            with self._changed:
                self._messages.popleft()
                self._changed.notify_all()


class Session:
    """The listening end, and a folder of its own that goes when it is closed.

    Args:
        variable: the environment variable by which the other end finds it.
    """

    def __init__(self, variable: str) -> None:
        self._variable = variable
        self._folder = OwnFolder()
        self.folder = self._folder.path
        self._key = secrets.token_bytes(16)
        self._listener = Listener(str(self.folder / "socket"), family="AF_UNIX", authkey=self._key)
        # accept() is only called when the socket is readable, so that a host that never connects can be noticed
        self._raw = self._listener._listener  # type: ignore[attr-defined]
        self._socket = self._raw._socket

    def close(self) -> None:
        """Close the socket and remove the folder."""
        self._listener.close()
        self._folder.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to connect."""
        return {self._variable: f"{self._key.hex()}:{self.folder / 'socket'}"}

    def fileno(self) -> int:
        """So that `multiprocessing.connection.wait` can wait for somebody to connect."""
        return int(self._socket.fileno())

    def accept(self) -> Connection:
        """The connection of whoever connects next, who may be anybody; OSError once the session is closed."""
        connection: Connection = self._raw.accept()
        return connection

    def greet(self, connection: Connection) -> bool:
        """Whether somebody who connected has the key and says what it is. Waits `GREETING_SECONDS` per message.

        A listener asks for the key by itself, but waits without end for somebody who says nothing.
        """
        try:
            _wait_at_most(connection, GREETING_SECONDS)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            connection.recv()  # its role
            _wait_at_most(connection, 0)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return False
        return True


def _wait_at_most(connection: Connection, seconds: int) -> None:
    """Let a read or a write on `connection` fail after so many seconds; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            one.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))


def connect(role: str, variable: str) -> Connection | None:
    """Connect to the session that an environment variable of this process names; None if it is not set."""
    address = os.environ.get(variable)
    if not address:
        return None
    key, path = address.split(":", 1)
    connection = Client(path, family="AF_UNIX", authkey=bytes.fromhex(key))
    connection.send(role)
    return connection
