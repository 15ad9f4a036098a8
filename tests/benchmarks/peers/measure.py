"""Measuring processes: a server's CPU time for the same prompts, and what a command takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

ANSWER_SECONDS = 900


class HostFailedError(Exception):
    """SGLang ended; the message is the last line that says why."""


def tree_cpu(pid: int) -> float:
    """CPU time (user and system, s) of a process and all below it."""
    process = psutil.Process(pid)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


class PeerServer:
    """An Engine in a process of its own (`engine.py`). A context manager: on leaving, all of it is gone."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], environment: dict[str, str], job: dict[str, Any]
    ) -> None:
        folder.mkdir(parents=True)
        address = str(folder / "socket")
        (folder / "job.json").write_text(json.dumps(job | {"arguments": list(arguments), "address": address}))
        self._listener = Listener(address, "AF_UNIX")
        self._log = folder / "sglang.log"
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("engine.py")), str(folder / "job.json")],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        self._connection: Connection | None = None

    def __enter__(self) -> PeerServer:
        try:
            self._wait([self._listener._listener._socket])  # type: ignore[attr-defined]  # accept() cannot time out
            self._connection = self._listener.accept()
            self._receive()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None and error[0] is None:
            self._connection.send("stop")
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                print("SGLang did not end by itself", file=sys.stderr)
        self._take_down()

    def cpu_of_a_pass(self) -> float:
        """CPU time (s) of answering all prompts once."""
        if self._connection is None:
            raise RuntimeError("not started")
        before = tree_cpu(self._process.pid)
        self._connection.send("answer")
        self._receive()
        return tree_cpu(self._process.pid) - before

    def _receive(self) -> None:
        if self._connection is None:
            raise RuntimeError("not started")
        self._wait([self._connection])
        try:
            self._connection.recv()
        except (EOFError, OSError) as error:
            raise HostFailedError(self._reason()) from error

    def _wait(self, sources: list[Any]) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not wait(sources, timeout=0.5):
            if self._process.poll() is not None or time.monotonic() > end:
                raise HostFailedError(self._reason())

    def _reason(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (errors or lines or ["no output"])[-1][:300]

    def _take_down(self) -> None:
        self._listener.close()
        if self._process.poll() is None:
            tree = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
        else:
            tree = []
        for one in tree:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()


@dataclass(frozen=True)
class Run:
    """What a command took: CPU and wall time (s), peak memory of its processes together (MB), exit status, output."""

    cpu: float
    wall: float
    peak: float
    status: int
    output: str


def run(command: Sequence[str], environment: dict[str, str], folder: Path) -> Run:
    """Run a command; memory is sampled every 20 ms (pages that processes share count for each)."""
    started, peak = time.perf_counter(), 0
    with (folder / "output.txt").open("w+b") as stream:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, _resident(process.pid))
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        stream.seek(0)
        output = stream.read().decode(errors="replace")
    wall = time.perf_counter() - started
    return Run(usage.ru_utime + usage.ru_stime, wall, peak / 1e6, process.returncode, output)


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            total += int(one.memory_info().rss)
    except psutil.NoSuchProcess:
        return total
    return total


def size(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files), len(files)
