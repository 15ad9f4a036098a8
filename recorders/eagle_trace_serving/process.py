"""A server as a process tree of ours: started, watched, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from eagle_trace.errors import HostError
from eagle_trace_serving.environment import OUT, OWN, PREFIX, variables
from eagle_trace_serving.folders import OwnFolder
from eagle_trace_serving.host import Address, Launch

LOG_LINES = 25
#: how argparse ends a program that it does not understand the arguments of
_WRONG_ARGUMENT = re.compile(r"\S+: error: ")
#: how long a server may take to end by itself before it is killed
STOP_SECONDS = 15.0
#: how long after its connection broke a server is seen to be dead
DEATH_SECONDS = 3.0
POLL_SECONDS = 0.1
#: runs a module as a program
PYTHON = (sys.executable, "-m")


class ServerProcess:
    """The process of a server, and its children. A context manager: it runs from entering to leaving.

    Args:
        title: the server's program, as sentences have it.
        launch: how it is started, told the address it is to have and the environment that arms it.

    Attributes:
        address: where it will listen.
        launch: how it is started.
    """

    def __init__(self, title: str, launch: Callable[[Address, dict[str, str]], Launch]) -> None:
        self._title = title
        self._folder = OwnFolder()
        # held while the server lives, so that nobody else is given the port before it listens there
        self._port = _reserved()
        self.address = Address(self._port.getsockname()[1], secrets.token_urlsafe(24))
        try:
            self.launch = launch(self.address, self._environment())
        except BaseException:
            self._close()
            raise

    def _environment(self) -> dict[str, str]:
        # what the user set for servers of their own does not hold for this one, which waits to be told
        own = variables()
        environment = {name: value for name, value in os.environ.items() if name not in own}
        environment |= {OUT: str(self._folder.path), OWN: "1", f"{PREFIX}REQUESTS": "0"}
        # nobody else waits for this server, and whoever asked for the recording wants all of it
        return environment | {f"{PREFIX}MAX_WAIT": "inf"}

    def _start(self) -> None:
        job = self._folder.path / "job.json"
        job.write_text(json.dumps(dict(self.launch.job)), encoding="utf-8")
        self._log = self._folder.path / "server.log"
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*PYTHON, self.launch.module, str(job)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(self.launch.environment),
                # a group of its own: Ctrl-C reaches `record` alone, which then takes the whole tree down in order
                start_new_session=True,
            )

    def __enter__(self) -> ServerProcess:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._take_down(gently=error[0] is None)
        finally:
            self._close()

    def _close(self) -> None:
        self._port.close()
        self._folder.cleanup()

    def require_alive(self, seconds: float = 0.0) -> None:
        """Refuse to go on with a server that ended, or does so within so many seconds (HostError)."""
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self._process.poll() is not None:
            self._died()

    def last_lines(self) -> str:
        """The end of what the server printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(_without_usage(lines)[-LOG_LINES:])

    def _died(self) -> NoReturn:
        raise HostError(
            f"{self._title} ended before the recording was done. Its last lines:\n{self.last_lines()}\n"
            "If they speak of shapes or indices, `eagle-trace check DRAFT --target TARGET` names what is wrong there"
        )

    def _take_down(self, *, gently: bool) -> None:
        """End the server and everything it started; its own children may outlive it otherwise."""
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        try:
            if gently:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.communicate(timeout=STOP_SECONDS)  # ends its input
        finally:  # whoever waits for it may be interrupted
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for member in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self._process.communicate()
        psutil.wait_procs(tree, timeout=5)


def _without_usage(lines: list[str]) -> list[str]:
    """What a program printed, without the usage that argparse puts in front of what is wrong with an argument."""
    if not lines or not _WRONG_ARGUMENT.match(lines[-1]):
        return lines
    begun = next((at for at in reversed(range(len(lines))) if lines[at].startswith("usage: ")), None)
    if begun is None or any(line[:1].strip() for line in lines[begun + 1 : -1]):
        return lines
    return [*lines[:begun], lines[-1]]


def _reserved() -> socket.socket:
    """A socket bound to a port of 127.0.0.1 that a server may bind to as well, and nobody is given by chance."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    return one
