"""Hosts: the programs that run a draft model, by name.

A package that records one registers an object in the entry-point group `eagle_trace.hosts`, under the host's name, and
nothing else has to change: ``record --mode train|serve --host NAME`` finds it there. Looking at all of them must stay
cheap, so an object's module imports nothing of its program.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from eagle_trace.errors import UsageError
from eagle_trace.store import Place

ENTRY_POINTS = "eagle_trace.hosts"

Kind = Literal["trainer", "server"]
#: the kind of host that each mode of `record` records
KINDS: dict[str, Kind] = {"train": "trainer", "serve": "server"}


class Host(Protocol):
    """A program that runs the draft, as the command line sees it.

    Attributes:
        name: as ``--host`` and a trace's manifest have it, e.g. ``sglang``.
        title: as sentences have it, e.g. ``SGLang``.
        kind: what it does with a draft.
        module: the module that is there if the program is installed.
        install: what installs the program: a command, or words.

    A host with a true `stands_in` runs no program but a forward of its own, in place of one that is not there: it is
    chosen without being named only for a draft that it takes.
    """

    name: str
    title: str
    kind: Kind
    module: str
    install: str

    def takes(self, draft: Path) -> bool:
        """Whether a draft's folder is in this host's own format, as far as its config says."""
        ...

    def record(self, **options: Any) -> Place:
        """Record one forward of the draft; the options are those of the command line for this kind of host."""
        ...


def is_installed(host: Host) -> bool:
    """Whether the program of `host` can be imported here; it is not."""
    try:
        return find_spec(host.module) is not None
    except (ImportError, ValueError):
        return False


def known_hosts(kind: Kind) -> dict[str, Any]:
    """All hosts of a kind that packages registered here, by name, whether their programs are installed or not."""
    hosts = (entry.load() for entry in entry_points(group=ENTRY_POINTS))
    return {host.name: host for host in sorted(hosts, key=lambda host: str(host.name)) if host.kind == kind}


def find_host(kind: Kind, name: str | None = None, *, draft: Path | None = None, program: bool = True) -> Any:
    """The host called `name`; without a name, the one that is installed, and of several the one that takes the draft.

    Args:
        kind: what it must do with a draft.
        name: as ``--host`` has it.
        draft: folder of the draft.
        program: whether its program must be installed here; a client that asks over HTTP needs only its package.

    Raises:
        UsageError: there is no such host, its program is not installed, or several are and none was named.
    """
    known = known_hosts(kind)
    if name is not None:
        return _named(kind, name, known, program=program)
    found = {
        one: host
        for one, host in known.items()
        if (not program or is_installed(host)) and (not _stands_in(host) or (draft is not None and host.takes(draft)))
    }
    fitting = [host for host in found.values() if len(found) == 1 or (draft is not None and host.takes(draft))]
    if len(fitting) == 1:
        return fitting[0]
    if found:
        raise UsageError(f"several {kind}s are installed here: name the one to record with --host {'|'.join(found)}")
    raise UsageError(f"no {kind} is installed here to be recorded; --host takes {_ways_out(known)}")


def _named(kind: Kind, name: str, known: dict[str, Any], *, program: bool) -> Any:
    if name not in known:
        others = [mode for mode, other in KINDS.items() if other != kind and name in known_hosts(other)]
        what = f"{name} belongs to --mode {others[0]}" if others else f"no {kind} is called {name!r}"
        raise UsageError(f"{what}: --host takes {_ways_out(known)}")
    if program and not is_installed(known[name]):
        raise UsageError(f"{known[name].title} is not installed here: {_way_out(known[name])}")
    return known[name]


def has_own_forward(draft: Path) -> bool:
    """Whether a forward of our own stands in for the trainer of a draft, in the very format that servers load."""
    return any(
        _stands_in(host) and is_installed(host) and host.takes(draft) for host in known_hosts("trainer").values()
    )


def _stands_in(host: Host) -> bool:
    return bool(getattr(host, "stands_in", False))


def _ways_out(known: dict[str, Any]) -> str:
    return " or ".join(f"{name} ({_way_out(host)})" for name, host in known.items()) or "none: no package records one"


def _way_out(host: Host) -> str:
    return host.install
