"""One comparison: checks, recordings and the diff, each of which can be told before the next begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace import __version__
from eagle_trace.checkpoints import read_config
from eagle_trace.errors import UsageError
from eagle_trace.jobs.fingerprint import of_folder, of_text
from eagle_trace.jobs.questions import write_prompts
from eagle_trace.jobs.servers import Ask, Pair, Running, Server, installed
from eagle_trace.jobs.workspace import Workspace
from eagle_trace.reader import Trace, open_trace
from eagle_trace.recording.hosts import find_host, has_own_forward

if TYPE_CHECKING:
    from eagle_trace_analysis import Diff
    from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding

Progress = Callable[[str], None]

#: checks of which a failure stops every server, or makes its answers those of another kind of model
POINTLESS = ("format", "config", "target-class")
#: names in the workspace
DEPLOYED, REFERENCE, PROMPTS = "deployed", "reference", "prompts.jsonl"
TRAIN, SERVE, OTHER = "train.trace", "serve.trace", "other.trace"


@dataclass(frozen=True)
class Asked:
    """What to compare.

    Attributes:
        target: target checkpoint.
        trained: draft as it was trained, speculators format; None if nobody has it.
        deployed: draft as it is served, in a server's format; None to export `trained`.
        prompts: prompts file; None for eight of our own.
        servers: one to hold against training, or two to hold against each other, the reference first.
        ask: how servers are started and asked.
        argv: the command line, for manifests.
    """

    target: Path
    trained: Path | None
    deployed: Path | None
    prompts: Path | None
    servers: tuple[Server, ...]
    ask: Ask = field(default_factory=Ask)
    argv: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError where something is missing that no default stands in for."""
        for name, folder in (("target", self.target), ("trained", self.trained), ("deployed", self.deployed)):
            if folder is not None and not folder.is_dir():
                raise UsageError(f"--{name} {folder} is not a folder: give the folder of a checkpoint")
        if self.prompts is not None and not self.prompts.exists():
            raise UsageError(f"--prompts {self.prompts} is not there: give a file of JSON lines, or leave it out")
        if self.trained is None and self.deployed is None:
            raise UsageError(
                "give --trained DRAFT (as speculators saved it), --deployed DRAFT (as it is served), or better both"
            )
        from eagle_trace_analysis.checkpoint.purpose import refuse_swapped

        servers = [server.host or "sglang" for server in self.servers]
        refuse_swapped(("--trained", self.trained), ("--deployed", self.deployed), servers)

    @property
    def two_servers(self) -> bool:
        """Whether two servers are compared with each other."""
        return len(self.servers) == 2

    def identity(self) -> dict[str, Any]:
        """What makes this question another one than the last; contents are compared later."""
        places = {name: str(path.absolute()) for name, path in self._paths().items() if path is not None}
        return {"places": places, "ask": asdict(self.ask), "servers": [one.called for one in self.servers]}

    def _paths(self) -> dict[str, Path | None]:
        return {"target": self.target, "trained": self.trained, "deployed": self.deployed, "prompts": self.prompts}


@dataclass(frozen=True)
class Judged:
    """What the two traces are asked for: see `eagle_trace_analysis.diff` and `eagle_trace_analysis.gate`.

    Attributes:
        minimum_share, tolerance, max_drop: as there.
        baseline: place of the trace that the other one must not be worse than.
    """

    minimum_share: float = 0.5
    tolerance: float = 4.0
    max_drop: float | None = None
    baseline: str | None = None


class Comparison:
    """The steps of one comparison, in order: `check`, `record`, `diff`.

    Args:
        asked: what to compare.
        workspace: where recordings go.
        progress: told what is going on.
    """

    def __init__(self, asked: Asked, workspace: Workspace, progress: Progress = lambda _: None) -> None:
        asked.check()
        self.asked = asked
        self.workspace = workspace
        self.progress = progress
        self.reused: list[str] = []
        self.floors: Trace | None = None
        self._known: dict[Path, str] = {}

    # ---- before anything runs

    def check(self) -> list[CheckResult]:
        """What can be said of the draft without running it, for each engine that is to serve it.

        Writes it for them first if there is only the trained one. Nothing of a server whose loader is not known here.

        Raises:
            CheckpointError: a folder cannot be read, or the trained draft cannot be exported.
        """
        from eagle_trace_analysis.checkpoint.check import check
        from eagle_trace_analysis.engines import ENGINES

        found: dict[str, CheckResult] = {}
        for server in self.asked.servers:
            host = server.host or "sglang"
            if host not in ENGINES:
                self.progress(f"what {host} loads is not written down here: nothing is checked before it starts")
            elif host not in found:
                draft = self.served(server) or self._trained
                found[host] = check(draft, target=self.asked.target, reference=self.asked.trained, engine=ENGINES[host])
        return list(found.values())

    def served(self, server: Server) -> Path | None:
        """The folder that a server loads; None where it runs already and none was named.

        The deployed one as it is, unless two servers of different formats are to load it; else the trained one, written
        as the server loads it.
        """
        from eagle_trace_analysis.checkpoint.purpose import purpose_of, write_for
        from eagle_trace_analysis.engines import ENGINES, SGLANG
        from eagle_trace_analysis.trainers import trainer_of

        deployed = self.asked.deployed
        if isinstance(server, Running) or (deployed is not None and not self.asked.two_servers):
            return deployed
        source, engine = deployed or self._trained, ENGINES.get(server.host or "", SGLANG)
        has_form = engine.READS or trainer_of(read_config(source)) is not None
        if purpose_of(source).engine is engine or not has_form or has_own_forward(source):
            return source
        name = DEPLOYED if deployed is None else f"{DEPLOYED}-{engine.NAME}"
        return self._made(name, source, lambda out: write_for(engine, source, out, target=self.asked.target))

    @property
    def _trained(self) -> Path:
        if self.asked.trained is None:
            raise UsageError("give --trained DRAFT (as speculators saved it)")
        return self.asked.trained

    def _own_reference(self) -> Path:
        from eagle_trace_analysis.checkpoint.own_reference import write_own_reference
        from eagle_trace_analysis.engines import ENGINES, SGLANG
        from eagle_trace_analysis.trainers import trainer_of

        deployed = self.asked.deployed
        if deployed is None:
            raise UsageError("give --deployed DRAFT (as it is served)")
        if trainer_of(read_config(deployed)) is not None:
            return deployed  # what a server loads is what was trained
        engine = ENGINES.get(self.asked.servers[0].host or "", SGLANG)
        self.progress("no --trained: what the deployed folder says is taken for the training")
        if has_own_forward(deployed):
            return deployed
        return self._made(
            REFERENCE, deployed, lambda out: write_own_reference(deployed, out, target=self.asked.target, engine=engine)
        )

    def _made(self, name: str, source: Path, make: Callable[[Path], object]) -> Path:
        """A folder made of `source` in the workspace, by this run or by one before it."""
        out = self.workspace.place(name)
        inputs = {"of": self._print_of(source), "target": self._print_of(self.asked.target), "by": __version__}
        if out.is_dir() and self.workspace.holds(name, inputs, of_folder(out)):
            return out
        self.workspace.forget(name)
        shutil.rmtree(out, ignore_errors=True)
        make(out)
        self.workspace.note(name, inputs, of_folder(out))
        return out

    # ---- recordings

    def record(self) -> tuple[Trace, Trace]:
        """The reference's trace and the other's.

        Raises:
            EagleTraceError: a server or the training forward could not be recorded.
        """
        prompts = self._prompts()
        first, *others = self.asked.servers
        if self.asked.two_servers and self.asked.ask.temperature > 0:
            raise UsageError("two servers answer alike only at temperature 0")
        serve = self._serve(SERVE, first, prompts)
        if others:
            other = self._serve(OTHER, others[0], prompts)
            # the training forward on the same tokens measures how far apart rounding may bring two servers
            self.floors = self._train(serve, self.asked.trained) if self.asked.trained is not None else None
            return serve, other
        return self._train(serve, self.asked.trained or self._own_reference()), serve

    def _prompts(self) -> Path:
        if self.asked.prompts is not None:
            return self.asked.prompts
        path = self.workspace.place(PROMPTS)
        self.progress(f"no --prompts: {write_prompts(self.asked.target, path)}")
        return path

    def _serve(self, name: str, server: Server, prompts: Path) -> Trace:
        place, draft, ask = self.workspace.place(name), self.served(server), self.asked.ask
        inputs = self._inputs(server, draft, prompts)
        if inputs is not None and (found := self.workspace.find(name, inputs)) is not None:
            return self._again(name, found)
        self.workspace.forget(name)
        server.record(Pair(self.asked.target, draft), prompts, ask, place, self._said(server))
        if inputs is not None:
            self.workspace.note(name, inputs, open_trace(place).manifest.recording)
        return open_trace(place)

    def _said(self, server: Server) -> Progress:
        if not self.asked.two_servers:
            return self.progress
        return lambda message: self.progress(f"{server.called}: {message.removeprefix(f'{server.called}: ')}")

    def _inputs(self, server: Server, draft: Path | None, prompts: Path) -> dict[str, Any] | None:
        own = server.inputs()
        if own is None:
            return None
        told = of_folder(prompts) if prompts.is_dir() else of_text([prompts.read_text("utf-8", "surrogateescape")])
        folders = {"target": self._print_of(self.asked.target), "draft": draft and self._print_of(draft)}
        # a list, as JSON has it, so that what was noted compares equal
        asked = asdict(self.asked.ask) | {"server_args": list(self.asked.ask.server_args)}
        return {**own, **folders, "prompts": told, "ask": asked}

    def _train(self, serve: Trace, draft: Path) -> Trace:
        place, ask = self.workspace.place(TRAIN), self.asked.ask
        inputs: dict[str, Any] = {
            "target": self._print_of(self.asked.target), "draft": self._print_of(draft),
            "replayed": serve.manifest.recording, "device": ask.device, "level": ask.level, "packages": installed(),
        }  # fmt: skip
        if serve.manifest.recording and (found := self.workspace.find(TRAIN, inputs)) is not None:
            return self._again(TRAIN, found)
        self.workspace.forget(TRAIN)
        find_host("trainer", draft=draft).record(
            target=self.asked.target, draft=draft, out=place, prompts=None, replay=serve.path, features="compute",
            steps=None, dtype="auto", device=ask.device, level=ask.level, max_bytes=None, force=True,
            argv=list(self.asked.argv), progress=lambda message: self.progress(f"training: {message}"),
        )  # fmt: skip
        self.workspace.note(TRAIN, inputs, open_trace(place).manifest.recording)
        return open_trace(place)

    def _again(self, name: str, found: Trace) -> Trace:
        self.reused.append(name)
        self.progress(f"{name} was recorded before from the same inputs: used again")
        return found

    def _print_of(self, folder: Path) -> str:
        if folder not in self._known:
            self._known[folder] = of_folder(folder)
        return self._known[folder]

    # ---- the answer

    def diff(self, reference: Trace, other: Trace, judged: Judged) -> Diff:
        """Compare the two, look for the cause, and apply the gate."""
        from eagle_trace_analysis.gate.compared import Compare

        self.progress("comparing")
        # those of the manifests where none was named
        named = self.asked.deployed is not None
        folders = [self.served(server) if named else None for server in self.asked.servers]
        compare = Compare(
            minimum_share=judged.minimum_share, tolerance=judged.tolerance, max_drop=judged.max_drop,
            floors=self.floors,
            folders=(folders[0] if self.asked.two_servers else None, folders[-1], self.asked.target),
        )  # fmt: skip
        before = open_trace(judged.baseline) if judged.baseline is not None else None
        return compare(reference, other, baseline=before)


def pointless(results: Sequence[CheckResult]) -> list[Finding]:
    """The failed checks that make a run pointless."""
    return [one for one in failures(results) if one.name in POINTLESS]


def failures(results: Sequence[CheckResult]) -> list[Finding]:
    """All failed checks."""
    from eagle_trace_analysis.checkpoint.finding import Status

    return [one for result in results for one in result.findings if one.status is Status.FAIL]
