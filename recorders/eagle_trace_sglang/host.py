"""SGLang as a process tree of ours: started, talked to, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from eagle_trace.errors import HostError, PromptsError, RecordingError
from eagle_trace_sglang import cpu
from eagle_trace_sglang.plugin import CPU_KERNELS
from eagle_trace_sglang.session import Message, Session

LOG_LINES = 25
#: how long SGLang may take to end by itself before it is killed
STOP_SECONDS = 15.0
#: how long after SGLang is ready its recorder may take to report; it does so before that, unless it never loaded
ARM_SECONDS = 10.0


class Host:
    """The engine's process, its children, and the connections to engine and recorder. A context manager."""

    def __init__(self, target: Path, arguments: Sequence[str], device: str, ranks: int = 1) -> None:
        self._session = Session()
        self._connections: dict[str, Connection] = {}
        self._inbox: defaultdict[str, deque[Message]] = defaultdict(deque)
        self._stopping = False
        job = self._session.folder / "job.json"
        job.write_text(json.dumps({"server_args": list(arguments), "target": str(target)}))
        environment = os.environ | self._session.environment
        if device == "cpu":
            environment = cpu.cpu_environment(environment, ranks=ranks) | {CPU_KERNELS: "1"}
        self._log = self._session.folder / "sglang.log"
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eagle_trace_sglang.engine", str(job)],
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

    def send(self, role: str, *message: Any) -> None:
        """Send a message to ``engine`` or to the recorder of a rank (`session.recorder_role`)."""
        try:
            self._connections[role].send(message)
        except OSError:
            self._died()

    def receive(self, role: str, name: str) -> list[Any]:
        """Arguments of the next message from `role`, which must be the one called `name`."""
        got, *arguments = self.next(role)
        if got != name:
            raise RuntimeError(f"the {role} said {got!r} where {name!r} was expected")
        return arguments

    def next(self, role: str) -> Message:
        """The next message from `role`.

        Raises:
            HostError: SGLang ended, or never loaded the recorder.
            RecordingError: the recorder reports that it failed.
            PromptsError: the engine refuses the prompts.
        """
        deadline: float | None = None
        while not self._inbox[role]:
            if role != "engine" and role not in self._connections:
                deadline = deadline or time.monotonic() + ARM_SECONDS
                if time.monotonic() > deadline:
                    raise HostError(
                        "SGLang started, but its recorder did not report: the plugin `eagle_trace` was not loaded or "
                        "found no draft worker of this SGLang version; is eagle-trace installed beside SGLang, and is "
                        f"SGLANG_PLUGINS set? SGLang's last lines:\n{self.last_lines()}"
                    )
            self._pump()
        return self._inbox[role].popleft()

    def stop(self) -> None:
        """Tell the engine to end by itself."""
        self.send("engine", "stop")
        self._stopping = True

    def last_lines(self) -> str:
        """The end of what SGLang printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _pump(self) -> None:
        """Take in whatever arrives within half a second, and notice who died."""
        roles = {connection: role for role, connection in self._connections.items()}
        sources: list[Any] = [self._session, *roles]
        source: Any
        for source in wait(sources, timeout=0.5):
            if source is self._session:
                role, connection = self._session.accept()
                self._connections[role] = connection
                continue
            try:
                message: Message = source.recv()
            except (EOFError, OSError):
                self._died()
            if message[0] == "refused":
                raise PromptsError(message[1])
            if message[0] == "failed":
                raise RecordingError(f"the recording failed, SGLang did not: {message[1]}\n{message[2]}")
            self._inbox[roles[source]].append(message)
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
