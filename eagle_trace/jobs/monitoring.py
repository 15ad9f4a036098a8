"""Looking at a draft while it trains: what a server would accept of it now, and whether it still fits the server.

Every so many optimizer steps the fixed prompts of a server's trace are run through the draft as it is in memory
(`eagle_trace_training.probe`), and the trace of that is held against the server's, or a baseline's, as `diff` does it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING

import fsspec

from eagle_trace.errors import IncomparableError, UsageError
from eagle_trace.jobs.looks import NOWHERE, Look, confirmed, own_fault, place_of, predicted
from eagle_trace.jobs.servers import Ask, Pair, Running
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import Trace, open_trace
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.wanted import Wanted
from eagle_trace.store import as_place

if TYPE_CHECKING:
    from eagle_trace_training.host import Training

logger = logging.getLogger("eagle_trace")

EVERY = 500
#: where traces of the training side lie: in memory, so that no disk is waited for
MEMORY = "memory://eagle-trace-monitoring"


@dataclass(frozen=True)
class Watched:
    """What is looked at, how often, and beside what.

    Attributes:
        served: serve trace whose prompts are replayed, or the URL of a running server, which is recorded at each look.
        target: folder of the target, which computes the features; None to take those the server fed.
        every: optimizer steps from one look to the next.
        baseline: trace that the training is held against; None for `served`.
        features: ``compute``, ``serve``, or a folder of the trainer's own training data; None for `compute` where
            there is a target, else `serve`.
        prompts: of a running server, the prompts to ask it.
        level: how much to keep of each row.
        device: where the target computes features.
        max_new_tokens: of a running server, how far it shall answer.
        api_key, admin_api_key: of a running server.
    """

    served: str
    target: Path | None = None
    every: int = EVERY
    baseline: str | None = None
    features: str | None = None
    prompts: Path | None = None
    level: str = "sketch"
    device: str = "cpu"
    max_new_tokens: int = 48
    api_key: str | None = None
    admin_api_key: str | None = None

    def check(self) -> None:
        """Raises UsageError if the options make no sense together."""
        if type(self.every) is not int or self.every < 1:
            raise UsageError(f"every must be 1 or more optimizer steps, not {self.every!r}")
        Wanted(level=self.level)  # refuses another
        if self.runs and self.prompts is None:
            raise UsageError(f"{self.served} is a running server: give prompts to ask it, a file of JSON lines")
        if not self.runs and self.prompts is not None:
            raise UsageError("prompts are those of the served trace: give prompts only beside a running server's URL")
        if self.prompts is not None:
            read_prompts(self.prompts)
        if self.kind == "compute" and self.target is None:
            raise UsageError("features='compute' runs the target: give target, or take features='serve'")
        if self.runs and self.kind == "serve" and self.level != "values":
            raise UsageError("features='serve' needs the server's values: give target, or level='values'")

    @property
    def runs(self) -> bool:
        """Whether `served` is a running server."""
        return self.served.startswith(("http://", "https://"))

    @property
    def kind(self) -> str:
        """Where features come from."""
        return self.features or ("compute" if self.target is not None else "serve")


@dataclass
class Monitoring:
    """Looks at a training from its first step to its last: a context manager, made by `eagle_trace.monitor.monitoring`.

    Attributes:
        training: the training.
        watched: what is looked at.
        log: takes the values of each look and their step; the trainer's own loggers if None.
        looks: all looks so far.
        failure: what went wrong, None if nothing did. It ends the looking, never the training.
    """

    training: Training
    watched: Watched
    log: Callable[[Mapping[str, float | str], int], None] | None = None
    looks: list[Look] = field(default_factory=list)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.watched.check()
        self._hooks = Hooks()
        self._steps, self._seen = 0, -1
        self.off = True

    # ---- from the training's side

    def __enter__(self) -> Monitoring:
        """Make what stays the same, and begin.

        Raises:
            EagleTraceError: the traces, the target or the draft are not what is needed.
        """
        from eagle_trace_training.live import rank_and_world
        from eagle_trace_training.probe import Probe

        if rank_and_world()[0]:
            return self  # one rank looks; the parameters are the same in all of them
        watched = self.watched
        self._probe = Probe(
            self.training.host, self.training.live, target=watched.target, features=watched.kind, level=watched.level,
            device=watched.device, progress=lambda message: logger.debug("%s", message),
        )  # fmt: skip
        self._served = None if watched.runs else _open_served(watched.served)
        #: what a running server records is fetched to a disk
        self._folder = TemporaryDirectory(prefix="eagle-trace-")
        self._baseline = open_trace(as_place(watched.baseline)) if watched.baseline is not None else None
        if self._served is not None:
            if self._baseline is not None:
                _refuse_others(self._baseline, self._served)
            self._probe.prepare(self._served)
        self._hooks.before(self.training.called, lambda *_: self._called())
        self.off = False
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None and not self.off and self._now() != self._seen:
            self._look_guarded(self._now())
        self._end()

    def _end(self) -> None:
        if not self.off:
            self.off = True
            self._hooks.remove()
            self._folder.cleanup()
            _forget()
        try:
            self.training.close()
        except Exception as error:  # noqa: BLE001 (never into the training)
            self._failed(error)

    def _now(self) -> int:
        """Optimizer steps done; where nobody counts them, forwards in training mode."""
        return self.training.step() if self.training.step is not None else self._steps

    def _called(self) -> None:
        if self.off or not self.training.called.training:
            return
        step = self._now()
        self._steps += 1
        # several forwards belong to one step where gradients are accumulated
        if step != self._seen and step % self.watched.every == 0:
            self._look_guarded(step)

    def _look_guarded(self, step: int) -> None:
        try:
            self._look(step)
        except self.training.live.interrupts:
            raise
        except Exception as error:  # noqa: BLE001 (never into the training: it ends the looking, and is said once)
            self._failed(error)
            self._end()

    def _failed(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            logger.warning(
                "eagle-trace no longer looks at this training: %s: %s; the training goes on without it",
                type(error).__name__, error,
            )  # fmt: skip

    # ---- one look

    def _look(self, step: int) -> None:
        from eagle_trace_training.probe import stream_is_captured

        if stream_is_captured():
            return  # the next step is as good
        began = time.perf_counter()
        self._seen = step
        served = self._served if self._served is not None else self._asked()
        trained = open_trace(self._probe.record(served, f"{MEMORY}/train.trace"))
        judged = self._looked_into(self._judged(trained, served), served)
        look = replace(judged, step=step, seconds=time.perf_counter() - began)
        if look.place is not None and look.place != self._last.place:
            why = f": {look.first.why}" if look.first is not None else ""
            logger.log(
                logging.WARNING if look.first is not None else logging.INFO,
                "step %d: first divergence %s%s", step, look.where, why,
            )  # fmt: skip
        self.looks.append(look)
        (self.log or self.training.log)(look.values(), step)

    @property
    def _last(self) -> Look:
        return self.looks[-1] if self.looks else Look()

    def _other(self, served: Trace) -> Trace:
        return self._baseline if self._baseline is not None else served

    def _looked_into(self, judged: Look, served: Trace) -> Look:
        """With values of a few prompts: the training's own steps recomputed, and the causes of what diverges."""
        trained = open_trace(self._probe.record(served, f"{MEMORY}/values.trace", "values"))
        other = self._other(served)
        if (own := own_fault(trained, self._probe.tensors())) is not None:
            place = place_of(own.site, trained.sites, other.sites)
            if judged.first is None or (own.step, place) < (judged.first.step, judged.place or 0):
                judged = replace(judged, first=own, place=place, incomparable=None)
        if judged.first is None:
            return judged
        if judged.place == self._last.place:
            return replace(judged, causes=self._last.causes)
        return replace(judged, causes=confirmed(trained, other, trained.manifest.settings["trained"]))

    def _asked(self) -> Trace:
        """The running server, recorded now."""
        watched, place = self.watched, Path(self._folder.name) / "serve.trace"
        server = Running(watched.served, watched.api_key, watched.admin_api_key)
        ask = Ask(max_new_tokens=watched.max_new_tokens, level=watched.level)
        if watched.prompts is None:
            raise UsageError(f"{watched.served} is a running server: give prompts to ask it")
        server.record(Pair(Path(), None), watched.prompts, ask, place, lambda _: None)
        return _open_served(str(place))

    def _judged(self, trained: Trace, served: Trace) -> Look:
        from eagle_trace_analysis import diff
        from eagle_trace_analysis.comparison.moved import beside_moved

        other = self._other(served)
        whole = diff(trained, other)
        accept = whole.accept_length if other is served else predicted(trained, served)
        left = beside_moved(whole, trained, other, trained.manifest.settings["trained"])
        first = left.first_divergence
        if first is not None:
            return Look(accept=accept, first=first, place=place_of(first.site, trained.sites, other.sites))
        if left.incomparable is None:
            return Look(accept=accept, place=NOWHERE)
        if not self.looks:
            raise IncomparableError(left.incomparable)
        return Look(accept=accept, incomparable=left.incomparable)


def _refuse_others(baseline: Trace, served: Trace) -> None:
    """Raises IncomparableError if a baseline has none of the prompts that are replayed."""
    if not set(baseline.prompts["prompt_key"]) & set(served.prompts["prompt_key"]):
        raise IncomparableError(
            f"the baseline {baseline.path} has no prompt in common with {served.path}: give one of the same prompts"
        )


def _open_served(place: str) -> Trace:
    from eagle_trace_training.replay import open_replay

    served = open_replay(as_place(place))
    if not served.table_rows("rounds"):
        raise UsageError(f"{place} holds no verify rounds, so that no accept length can be predicted from it")
    return served


def _forget() -> None:
    """Free the memory that traces took."""
    memory = fsspec.filesystem("memory")
    place = MEMORY.removeprefix("memory:/")
    if memory.exists(place):
        memory.rm(place, recursive=True)
