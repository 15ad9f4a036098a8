"""How `record` talks to the processes it started: a Unix socket, and one message at a time.

`record` listens. The **engine** connects (which owns SGLang), and a **recorder** for each tensor-parallel rank (the
plugin inside SGLang's scheduler processes). A message is a tuple whose first element names it. A connection that ends
is a process that died, so nobody waits for a host that is gone.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

#: set by `record` for the processes it starts; the plugin is inert without it
ARMED = "EAGLE_TRACE_SESSION"

Message = tuple[Any, ...]


def recorder_role(rank: int) -> str:
    """Role of the recorder in that rank; rank 0's speaks for the others."""
    return "recorder" if rank == 0 else f"recorder of rank {rank}"


class Session:
    """The listening end, and a folder of its own that goes when it is closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eagle-trace-")
        self.folder = Path(self._folder.name)
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
        return {ARMED: f"{self._key.hex()}:{self.folder / 'socket'}"}

    def fileno(self) -> int:
        """So that `multiprocessing.connection.wait` can wait for somebody to connect."""
        return int(self._socket.fileno())

    def accept(self) -> tuple[str, Connection]:
        """Role (``engine``, see also `recorder_role`) and connection of whoever connects next."""
        connection: Connection = self._listener.accept()
        return str(connection.recv()), connection


def connect(role: str) -> Connection | None:
    """Connect to the session of this process's environment; None if there is none."""
    address = os.environ.get(ARMED)
    if not address:
        return None
    key, path = address.split(":", 1)
    connection = Client(path, family="AF_UNIX", authkey=bytes.fromhex(key))
    connection.send(role)
    return connection
