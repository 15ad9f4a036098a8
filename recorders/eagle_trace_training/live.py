"""Recording the forwards of a model that trains: the real batches, features, masks and loss.

Hooks copy what passes them and change nothing. Whatever fails in here ends the recording and is said once; it never
reaches the training.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eagle_trace.checkpoints import config_digest
from eagle_trace.errors import HostError, UsageError
from eagle_trace.manifest import Manifest, without_secrets
from eagle_trace.patience import MAX_WAIT
from eagle_trace.recording.hooks import Hooks
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.store import as_place
from eagle_trace.writer import TOO_SLOW, TraceWriter, prepare_output
from eagle_trace_training.first_tokens import FirstTokens
from eagle_trace_training.forward import say_seen
from eagle_trace_training.host import LiveDraft, TrainingHost
from eagle_trace_training.live_batches import BatchTaker, LiveOptions
from eagle_trace_training.record import package_versions
from eagle_trace_training.weights import parameter_rows

#: how long leaving the block, or the end of the process, waits for a seal; and when a disk is taken to hang [s]
LEAVE_SECONDS, LEAVE_STALL_SECONDS = 5.0, 2.0

logger = logging.getLogger("eagle_trace")

#: recordings whose seal is being written
_sealing: set[Recording] = set()


def recording(
    host: TrainingHost,
    model: Any,
    *,
    out: str | Path,
    batches: int = 2,
    level: str = "values",
    selection: Selection = EVERYTHING,
    steps: int | None = None,
    max_bytes: int | None = None,
    first_token: int | None = None,
    dataset: Any = None,
    force: bool = False,
    max_wait: float = MAX_WAIT,
    **more: Any,
) -> Recording:
    """Record the next forwards of a draft that trains: ``with recording(host, model, out="train.trace"): ...``.

    After `batches` forwards the hooks come off and the trace is sealed in the background, also in the middle of the
    block; leaving the block waits for the seal as long as the disk moves, and at most `LEAVE_SECONDS`. It is sealed as
    stopped, with the reason, when the block ends earlier or raises. Nothing about the training changes: gradients,
    parameters, loss and random state are the same to the last bit, but for what the manifest's `changes` name. What
    fails while recording ends the recording, is logged once under the name ``eagle_trace``, and stands in the manifest.

    Each document of each batch becomes one prompt of the trace. Its first token is not in the batch (training
    drops it): it is looked up in `dataset`, else taken to be `first_token`, else -1 in prompts.parquet.

    Args:
        host: the trainer.
        model: what the trainer trains, also inside DistributedDataParallel, FSDP or torch.compile.
        out: folder of the trace to write, or its URL; all ranks write into it.
        batches: number of forwards to record; batches of padding alone do not count.
        level: how much to keep of each row.
        selection: which sites, roots, steps and documents to keep; shapes are kept of all sites.
        steps: keep this many forwards of each batch (short for a selection of steps).
        max_bytes: stop after so many bytes of captures, at the end of a step.
        first_token: first token of documents that `dataset` does not hold.
        dataset: what the batches are made from: `datasets.Dataset` or what holds one, an Arrow table, or a list of
            token id lists; or a tuple of such.
        force: replace the trace at `out`.
        max_wait: how long the training may wait for the disk while it is recorded, in all [s]. A disk that is slower
            ends the recording with what is whole.
        more: other fields of `Wanted`.

    Raises:
        UsageError: not an EAGLE-3 draft of this trainer, or an argument makes no sense.
        OutputExistsError: `out` is taken (raised on entering the block, as is RecordingError for a folder that cannot
            be made; where the disk does not say so at once, it is logged instead).
    """
    if steps is not None:
        if steps < 1 or selection.steps:
            raise UsageError(f"steps must be 1 or more, and not beside a selection of steps; it is {steps}")
        selection = Selection(selection.sites, selection.roots, ((0, steps),), selection.prompts)
    datasets = dataset if isinstance(dataset, tuple) else () if dataset is None else (dataset,)
    place = as_place(str(out))
    options = LiveOptions(
        place, batches, first_token, datasets, force,
        level=level, selection=selection, max_bytes=max_bytes, max_wait=max_wait, **more,
    )  # fmt: skip
    return Recording(host, host.live(model), options)


class Recording:
    """A recording of a model that trains; a context manager, made by `recording`.

    Attributes:
        path: folder of the trace.
        done: whether the hooks are off again.
        failure: what went wrong in the recorder, None if nothing did.
    """

    def __init__(self, host: TrainingHost, live: LiveDraft, options: LiveOptions) -> None:
        self._asked, self._host = options, host
        self._live, self._model = live, live.draft
        self._first_tokens = FirstTokens(options.datasets, options.first_token)
        self._rank, self._world = rank_and_world()
        self.path = options.out
        self._taker: BatchTaker | None = None
        self.done = True
        self.failure: BaseException | None = None
        self._hooks = Hooks(self._guarded)
        self._versions: list[int] | None = None
        self._moved = False
        self._sealer: threading.Thread | None = None

    @property
    def batches(self) -> int:
        """Forwards recorded so far."""
        return self._taker.batches if self._taker is not None else 0

    @property
    def waited(self) -> float:
        """How long the training has waited for the disk in this recording, in all, until it was told to finish [s]."""
        return self._writer.waited

    def __enter__(self) -> Recording:
        manifest = _manifest(self._host, self._live, self._asked.level)
        # every rank trains on documents of its own
        manifest.rank = manifest.dp_rank = self._rank
        manifest.ranks = self._world
        manifest.settings = {"training": True, "batches": self._asked.batches}
        if left_out := self._asked.selection.to_dict():
            manifest.settings["selection"] = left_out
        prepare = partial(prepare_output, self.path, force=self._asked.force, rank=self._rank, ranks=self._world)
        asked = self._asked
        self._writer = TraceWriter(
            self.path, manifest, max_bytes=asked.max_bytes, max_wait=asked.max_wait, prepare=prepare, background=True
        )
        self._taker = BatchTaker(self._live, self._writer, self._asked, self._first_tokens)
        self.done = False
        self._guarded(self._hang)(self._taker)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        seen = f"{self.batches} of {self._asked.batches} batches"
        if error is not None:
            self.finish(f"the block raised {_words(error)} after {seen}")
        else:
            self.finish(f"the block ended after {seen}")
        self.wait()

    # ---- hooks ------------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.done:
                return
            try:
                with torch.no_grad():
                    function(*args)
            except self._live.interrupts:
                raise
            except Exception as error:  # noqa: BLE001 (never into the training: it ends the recording, and is said)
                self._fail(error)

        return call

    def _hang(self, taker: BatchTaker) -> None:
        module, hooks = self._live.module, self._hooks
        hooks.before(module, lambda _module, args, kwargs: self._begin(taker, args, kwargs))
        self._tap, changes = self._live.hang(hooks, taker.receive, taker.take_targets)
        hooks.after(module, lambda _module, _args, output: self._end(taker, output))
        self._writer.manifest.changes += changes

    def _begin(self, taker: BatchTaker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if taker.open:
            raise HostError("the forward before this one raised: the rest of its batch was never computed")
        given = self._live.signature.bind(None, *args, **kwargs).arguments
        begun = taker.read(given)
        if begun is None:
            return
        if self._versions is None:
            self._describe(given)
        elif not self._moved and self._versions != self._now():
            self._moved = True
            self._writer.manifest.warnings.append(
                f"the parameters moved after batch {self.batches - 1}: params.parquet holds those it was computed with"
            )
        if self._writer.accepting:
            self._tap.restart()
            taker.begin(begun, given["hidden_states"].detach())
        else:
            self._over()

    def _end(self, taker: BatchTaker, output: Any) -> None:
        if not taker.open:
            return
        if not taker.batches:
            say_seen(self._writer.manifest, self._tap)
        taker.end(output)
        if taker.full or taker.batches >= self._asked.batches:
            self._over()

    # ---- the beginning and the end ----------------------------------------------------------------------------

    def _now(self) -> list[int]:
        """Counts that grow whenever a parameter is written to."""
        return [parameter._version for parameter in self._model.parameters()]

    def _describe(self, given: Mapping[str, Any]) -> None:
        """What only the first forward shows: how training runs the draft, and the parameters it begins with."""
        self._versions = self._now()
        model, manifest = self._model, self._writer.manifest
        device = manifest.device
        autocast = torch.is_autocast_enabled(device)
        manifest.settings |= {
            **self._live.settings(given),
            "features": "training",
            "autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.") if autocast else None,
            "parameters": str(model.fc.weight.dtype).removeprefix("torch."),
        }
        if is_sharded(model):
            manifest.warnings.append("the parameters are sharded over ranks (FSDP): params.parquet leaves them out")
            return
        for record in parameter_rows(model, self._host.not_draft, None):
            self._writer.put_record("params", record)

    def _over(self) -> None:
        """Recording ends by itself: all batches, the budget spent, or the writer failed."""
        if self._writer.failure is not None:
            self._fail(self._writer.failure)
        else:
            self.finish(None)

    def _fail(self, error: BaseException) -> None:
        if self.done:
            return
        self.failure = error
        why = f"the recorder failed in batch {self.batches}: {_words(error)}"
        self._writer.manifest.warnings.append(why)
        logger.warning("recording into %s ended: %s; the training goes on without it", self.path, why)
        self.finish(why)

    def finish(self, why: str | None) -> None:
        """Take all hooks off and seal the trace in the background; nothing happens if that is done.

        Waits for the seal as long as the training may still wait for the disk (`max_wait`); see `wait`.

        Args:
            why: why recording stopped early, None if it did not.
        """
        if self.done:
            return
        self.done = True
        self._sealer = sealer = threading.Thread(target=self._seal, args=(why,), name="eagle-trace-seal", daemon=True)
        _sealing.add(self)
        try:
            self._hooks.remove()
        except Exception as error:  # noqa: BLE001 (the training must go on)
            self._failed_to_finish(error)
        sealer.start()
        started = time.monotonic()
        sealed = self._writer.wait(self._writer.patience)
        self._writer.spend(time.monotonic() - started)
        if sealed:
            sealer.join(LEAVE_STALL_SECONDS)

    def wait(self) -> bool:
        """Whether the trace is sealed, or has failed; waits for a disk that moves, at most `LEAVE_SECONDS`."""
        # a disk that was too slow for the training is not waited for afterwards
        slow = self._writer.failure is None and self._writer.manifest.stopped == TOO_SLOW
        sealed = self._writer.wait(0.0 if slow else LEAVE_SECONDS, LEAVE_STALL_SECONDS)
        if sealed and self._sealer is not None:
            self._sealer.join(LEAVE_STALL_SECONDS)
        return sealed

    def _seal(self, why: str | None) -> None:
        """In a thread of its own: the training must not wait for the disk."""
        manifest, taker = self._writer.manifest, self._taker
        try:
            manifest.stopped = manifest.stopped or why
            if taker is not None:
                taker.close()
            self._writer.seal()
            if manifest.stopped == TOO_SLOW:
                logger.warning("recording into %s ended early: %s", self.path, TOO_SLOW)
        except Exception as error:  # noqa: BLE001 (the training must go on)
            self._failed_to_finish(error)
            manifest.stopped = manifest.stopped or _words(error)
            self._writer.abort(error)
        finally:
            _sealing.discard(self)

    def _failed_to_finish(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            logger.warning("the trace %s could not be finished: %s", self.path, _words(error))


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) where torch.distributed was not set up."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def is_sharded(model: Any) -> bool:
    """Whether this process holds parts of the parameters only (FSDP)."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _manifest(host: TrainingHost, live: LiveDraft, level: str) -> Manifest:
    """The manifest of a recording that begins; what the first forward shows comes later."""
    manifest = Manifest(
        side="train",
        level=level,
        host=host.name,
        packages=package_versions(host),
        device=live.draft.fc.weight.device.type,
        argv=without_secrets(sys.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    describe(live, manifest)
    return manifest


def describe(live: LiveDraft, manifest: Manifest) -> None:
    """What is known of draft and target before the first forward."""
    config = live.draft.config
    written = json.loads(config.to_json_string())
    manifest.draft = {
        # no path: what is on disk is not what is in training
        "path": None,
        "started_from": str(config.name_or_path or "") or None,
        "config_digest": config_digest(written),
        "config": written,
        **live.facts(),
    }
    manifest.target = live.target()


@atexit.register
def _wait_for_seals() -> None:
    """The process ends: what is being sealed gets a few seconds, all together."""
    deadline = time.monotonic() + LEAVE_SECONDS
    for one in list(_sealing):
        if time.monotonic() < deadline:
            one.wait()


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
