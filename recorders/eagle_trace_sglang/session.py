"""How processes of one machine talk: a Unix socket, and one message at a time.

`record` listens for the **engine** it started, which owns SGLang; SGLang's main process listens for the **recorder**
in each scheduler process. A message is a tuple whose first element names it. A connection that ends is a process that
died, so nobody waits for a host that is gone.
"""

from __future__ import annotations

import os
import secrets
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from eagle_trace_sglang.folders import OwnFolder

Message = tuple[Any, ...]


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
        self._socket = self._listener._listener._socket  # type: ignore[attr-defined]

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

    def accept(self) -> tuple[str, Connection]:
        """Role (``engine``, ``recorder``) and connection of whoever connects next."""
        connection: Connection = self._listener.accept()
        return str(connection.recv()), connection


def connect(role: str, variable: str) -> Connection | None:
    """Connect to the session that an environment variable of this process names; None if it is not set."""
    address = os.environ.get(variable)
    if not address:
        return None
    key, path = address.split(":", 1)
    connection = Client(path, family="AF_UNIX", authkey=bytes.fromhex(key))
    connection.send(role)
    return connection
