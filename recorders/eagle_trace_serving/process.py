"""SGLang as a process tree of ours: started, talked to, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from eagle_trace.errors import HostError, PromptsError, RecordingError
from eagle_trace_serving.attached import VARIABLES
from eagle_trace_serving.session import Message, Session
from eagle_trace_sglang.engine import ENGINE
from eagle_trace_sglang.plugin import OUT, PREFIX
from sglang_cpu_eagle import cpu_environment

LOG_LINES = 25
#: how long SGLang may take to end by itself before it is killed
STOP_SECONDS = 15.0
#: runs a module as a program
PYTHON = (sys.executable, "-m")


class Host:
    """The engine's process, its children, and the connection to it. A context manager."""

    def __init__(self, target: Path, arguments: Sequence[str], device: str, ranks: int = 1) -> None:
        self._session = Session(ENGINE)
        self._connection: Connection | None = None
        self._inbox: deque[Message] = deque()
        self._stopping = False
        job = self._session.folder / "job.json"
        job.write_text(json.dumps({"server_args": list(arguments), "target": str(target)}))
        # what the user set for servers of their own does not hold for this one, which waits to be told
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment |= self._session.environment | {OUT: str(self._session.folder), f"{PREFIX}REQUESTS": "0"}
        # nobody else waits for this server, and whoever asked for the recording wants all of it
        environment[f"{PREFIX}MAX_WAIT"] = "inf"
        if device == "cpu":
            environment = cpu_environment(environment, ranks=ranks)
        self._log = self._session.folder / "sglang.log"
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*PYTHON, "eagle_trace_sglang.engine", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                # a group of its own: Ctrl-C reaches `record` alone, which then takes the whole tree down in order
                start_new_session=True,
            )

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._take_down()
        finally:
            self._session.close()

    def send(self, *message: Any) -> None:
        """Send a message to the engine."""
        if self._connection is None:
            raise RuntimeError("the engine has not connected yet")
        try:
            self._connection.send(message)
        except OSError:
            self._died()

    def receive(self, name: str) -> list[Any]:
        """Arguments of the next message, which must be the one called `name`."""
        got, *arguments = self.next()
        if got != name:
            raise RuntimeError(f"the engine said {got!r} where {name!r} was expected")
        return arguments

    def next(self) -> Message:
        """The next message.

        Raises:
            HostError: SGLang ended, or never loaded the recorder.
            RecordingError: the recording failed.
            PromptsError: the engine refuses the prompts.
        """
        while not self._inbox:
            self._pump()
        return self._inbox.popleft()

    def stop(self) -> None:
        """Tell the engine to end by itself."""
        self.send("stop")
        self._stopping = True

    def last_lines(self) -> str:
        """The end of what SGLang printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _pump(self) -> None:
        """Take in what arrives within half a second, and notice who died."""
        source: Any = self._session if self._connection is None else self._connection
        if wait([source], timeout=0.5):
            if self._connection is None:
                connection = self._session.accept()
                self._connection = connection if self._session.greet(connection) else None
                return
            try:
                message: Message = self._connection.recv()
            except (EOFError, OSError):
                self._died()
            if message[0] == "refused":
                raise PromptsError(message[1])
            if message[0] == "failed":
                raise RecordingError("\n".join(part for part in message[1:] if part))
            self._inbox.append(message)
        if self._process.poll() is not None:
            self._died()

    def _died(self) -> NoReturn:
        raise HostError(
            f"SGLang ended before the recording was done. Its last lines:\n{self.last_lines()}\n"
            "If they speak of shapes or indices, `eagle-trace check DRAFT --target TARGET` names what is wrong there"
        )

    def _take_down(self) -> None:
        """End the engine and everything it started; SGLang's own children may outlive it otherwise."""
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        if self._stopping:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=5)
