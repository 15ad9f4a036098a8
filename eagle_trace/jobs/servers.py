"""The servers that a comparison records: one started here, one started with another Python, one that runs already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from eagle_trace.errors import UsageError
from eagle_trace.jobs.environments import PACKAGES, Environment
from eagle_trace.jobs.fingerprint import of_environment
from eagle_trace.recording.hosts import find_host

Progress = Callable[[str], None]


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

    @property
    def _environment(self) -> Environment:
        return Environment(self.python)

    def inputs(self) -> dict[str, Any]:
        """Interpreter, host, the releases installed beside it, and environment variables.

        Raises:
            UsageError: it is not a Python, or eagle-trace is not installed there.
        """
        packages = self._environment.installed().packages
        python = self._environment.interpreter
        return {"python": python, "host": self.host, "packages": packages, "environment": of_environment()}

    def record(self, pair: Pair, prompts: Path, ask: Ask, out: Path, progress: Progress) -> None:
        """Run `record --mode serve` there."""
        options = {name: value for name, value in asdict(ask).items() if name != "server_args" and value is not None}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        paths = [f"--target={pair.target}", f"--draft={pair.needed_draft}", f"--prompts={prompts}", f"--out={out}"]
        host = [f"--host={self.host}"] if self.host else []
        last = ["--", *ask.server_args] if ask.server_args else []
        self._environment.run(
            ["record", "--mode=serve", *host, *paths, *words, "--force", *last],
            lambda message: progress(f"{self.called}: {message}"),
        )


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

    Args:
        hosts: names of servers; each is started in the first of the environments that has it, else here.
        environments: Pythons; without `hosts`, the server that is installed beside each is started there.
        against: URL of a server that runs already.
        keys: its keys.

    Raises:
        UsageError: more than two, or a host that is not installed.
    """
    places = [Environment(python) for python in environments]
    found: list[Server]
    if hosts:
        found = [_placed(host, places) for host in hosts]
        _refuse_unused(hosts, places)
    else:
        found = [Elsewhere(one.python, host=_only_server(one)) for one in places]
    if against is not None:
        found.append(Running(against, keys.get("api_key"), keys.get("admin_api_key")))
    found = found or [Here(find_host("server").name)]
    if len(found) > 2:
        raise UsageError(f"{len(found)} servers were named: give one, or two to compare them with each other")
    if len(found) == 2 and found[0].called == found[1].called:
        found = [replace(one, called=f"{one.called} ({name})") for one, name in zip(found, "AB", strict=True)]  # type: ignore[type-var]
    return found


def _placed(host: str, places: Sequence[Environment]) -> Server:
    """A server in the first of some environments that has it, else in this one."""
    find_host("server", host, program=False)
    for place in places:
        if host in place.installed().servers:
            return Elsewhere(place.python, host, host)
    return Here(find_host("server", host).name)


def _refuse_unused(hosts: Sequence[str], places: Sequence[Environment]) -> None:
    for place in places:
        if not set(hosts) & set(place.installed().servers):
            has = ", ".join(place.installed().servers) or "no server"
            raise UsageError(f"--env {place.python} has {has}, and --host asks for {', '.join(hosts)}")


def _only_server(place: Environment) -> str:
    servers = place.installed().servers
    if len(servers) == 1:
        return servers[0]
    if not servers:
        raise UsageError(f"--env {place.python} has no server to be recorded: install one there, beside eagle-trace")
    raise UsageError(f"--env {place.python} has several servers: name one with --host {'|'.join(servers)}")


def installed() -> dict[str, str]:
    """Releases of `PACKAGES` in this environment."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
