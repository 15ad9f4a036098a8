"""The servers that a comparison records: one started here, one started with another Python, one that runs already."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from eagle_trace.errors import HostError, UsageError
from eagle_trace.jobs.fingerprint import of_environment
from eagle_trace.recording.hosts import find_host

Progress = Callable[[str], None]

#: packages whose release decides what a server computes
PACKAGES = ("eagle-trace", "sglang", "vllm", "torch", "transformers", "sgl-kernel", "flashinfer-python")
#: how long a Python of another environment may take to say what is installed there, and to end when told to [s]
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
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Ask:
    """How a server is started and asked; names as those of `eagle-trace record --mode serve`."""

    steps: int = 3
    topk: int = 1
    draft_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 48
    batch_size: int = 8
    temperature: float = 0.0
    level: str = "values"
    server_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Folders of the target and of the draft as it is served; no draft where every server runs already."""

    target: Path
    draft: Path | None

    @property
    def needed_draft(self) -> Path:
        """The draft, for a server that has to be started (UsageError where there is none)."""
        if self.draft is None:
            raise UsageError("a server that is to be started needs a draft: give --deployed, or --trained to export")
        return self.draft


class Server(Protocol):
    """Something that can be recorded; `called` is its name in messages, `host` that of its program, None if unknown."""

    @property
    def host(self) -> str | None: ...

    @property
    def called(self) -> str: ...

    def inputs(self) -> dict[str, Any] | None:
        """What decides its recording beside checkpoints, prompts and options; None if that cannot be known."""

    def record(self, pair: Pair, prompts: Path, ask: Ask, out: Path, progress: Progress) -> None:
        """Leave a sealed trace at `out`, replacing one that is there."""


@dataclass(frozen=True)
class Here:
    """A server that the installed recorder starts, in the environment of this command."""

    host: str
    called: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "called", self.called or self.host)

    def inputs(self) -> dict[str, Any]:
        """Host, releases and environment variables."""
        return {"host": self.host, "packages": installed(), "environment": of_environment()}

    def record(self, pair: Pair, prompts: Path, ask: Ask, out: Path, progress: Progress) -> None:
        """Start it, record, end it."""
        options = asdict(ask)
        options["host_args"] = options.pop("server_args")
        find_host("server", self.host).record(
            target=pair.target, draft=pair.needed_draft, prompts=prompts, out=out, force=True, progress=progress,
            **options,
        )  # fmt: skip


@dataclass(frozen=True)
class Elsewhere:
    """A server that `eagle-trace record` of another Python environment starts.

    Attributes:
        python: its interpreter.
    """

    python: Path
    called: str = ""
    host: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "called", self.called or str(self.python))

    def inputs(self) -> dict[str, Any]:
        """Interpreter, the releases installed beside it, and environment variables.

        Raises:
            UsageError: it is no Python, or eagle-trace is not installed there.
        """
        return {"python": str(self.python.absolute()), "packages": self._packages(), "environment": of_environment()}

    def record(self, pair: Pair, prompts: Path, ask: Ask, out: Path, progress: Progress) -> None:
        """Run `record --mode serve` there."""
        options = {name: value for name, value in asdict(ask).items() if name != "server_args" and value is not None}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        paths = [f"--target={pair.target}", f"--draft={pair.needed_draft}", f"--prompts={prompts}", f"--out={out}"]
        last = ["--", *ask.server_args] if ask.server_args else []
        self._run(["record", "--mode=serve", *paths, *words, "--force", *last], progress)

    def _packages(self) -> dict[str, str]:
        try:
            done = subprocess.run(
                [str(self.python.absolute()), "-c", _PROBE % (PACKAGES,)],
                check=False, capture_output=True, text=True, timeout=PROBE_SECONDS, errors="replace",
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"--env {self.python} is not a Python that can be run ({error})") from error
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no word why"])[-1]
            raise UsageError(
                f"--env {self.python} has no eagle-trace that runs ({why}): install it there beside the server, "
                f"with {self.python} -m pip install 'eagle-trace[serve]'"
            )
        try:
            found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise UsageError(f"--env {self.python} is not a Python: it answered {done.stdout[:80]!r}") from error
        return found

    def _run(self, words: Sequence[str], progress: Progress) -> None:
        process = subprocess.Popen(
            [str(self.python.absolute()), "-m", "eagle_trace.cli.main", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        said: list[str] = []
        try:
            assert process.stderr is not None
            with process.stderr as lines:
                for line in lines:
                    said.append(line.rstrip("\n"))
                    progress(f"{self.called}: {said[-1]}")
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


@dataclass(frozen=True)
class Running:
    """A server that runs already, started with ``EAGLE_TRACE_OUT`` in its environment."""

    url: str
    api_key: str | None = None
    admin_api_key: str | None = None
    called: str = ""
    host: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "called", self.called or self.url)

    def inputs(self) -> None:
        """Nobody can say whether it is the server that answered last time."""

    def record(self, pair: Pair, prompts: Path, ask: Ask, out: Path, progress: Progress) -> None:
        """Have it record our prompts, and fetch the trace; target and draft are those it has."""
        del pair
        if ask.server_args:
            raise UsageError("a server that runs already has its arguments: leave out what follows --")
        from eagle_trace_serving.record import attach

        attach(
            url=self.url, out=out, prompts=prompts, api_key=self.api_key, admin_api_key=self.admin_api_key,
            max_new_tokens=ask.max_new_tokens, batch_size=ask.batch_size, temperature=ask.temperature,
            level=ask.level, force=True, progress=progress,
        )  # fmt: skip


def servers_of(
    hosts: Sequence[str], environments: Sequence[Path], against: str | None, keys: Mapping[str, Any]
) -> list[Server]:
    """The servers that were asked for, the reference first: one, or two to be compared with each other.

    Raises:
        UsageError: more than two, or a host that is not installed.
    """
    for host in hosts:
        find_host("server", host)
    # a bare name is looked up as a shell would
    found: list[Server] = [Elsewhere(Path(shutil.which(python) or python)) for python in environments]
    if hosts and environments:
        raise UsageError("--host starts a server here and --env one in another environment: give one of the two")
    found += [Here(host) for host in hosts]
    if against is not None:
        found.append(Running(against, keys.get("api_key"), keys.get("admin_api_key")))
    found = found or [Here(find_host("server").name)]
    if len(found) > 2:
        raise UsageError(f"{len(found)} servers were named: give one, or two to compare them with each other")
    if len(found) == 2 and found[0].called == found[1].called:
        found = [replace(one, called=f"{one.called} ({name})") for one, name in zip(found, "AB", strict=True)]  # type: ignore[type-var]
    return found


def installed() -> dict[str, str]:
    """Releases of `PACKAGES` in this environment."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _error(said: Sequence[str], status: int) -> str:
    """What a command that failed said last: its sentence, with the lines of the host below it."""
    for at in range(len(said) - 1, -1, -1):
        if said[at].startswith("eagle-trace: "):
            return "\n".join([said[at].removeprefix("eagle-trace: "), *said[at + 1 :]])
    return "\n".join(said[-10:]) or f"it ended with status {status} and said nothing"
