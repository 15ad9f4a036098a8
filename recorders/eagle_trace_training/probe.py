"""Fixed prompts that are run through a draft while it trains, again and again, each time into a trace.

What is run is a twin of the draft (`twin`) in the serving dtype, with the code of `record --mode train --replay`: on
the tokens and chains of a server, and on the features of the target, which are made once and kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eagle_trace.errors import HostError
from eagle_trace.manifest import Manifest, without_secrets
from eagle_trace.prompts import prompts_digest
from eagle_trace.reader import Trace
from eagle_trace.recording.names import canonical_name
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.store import Place
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_training.features import Features, Precision, open_features
from eagle_trace_training.host import LiveDraft, LoadedDraft, TrainingHost
from eagle_trace_training.live import describe
from eagle_trace_training.numerics import check_dtype, resolve_device, threads_for
from eagle_trace_training.record import keys_of, package_versions, tasks_of
from eagle_trace_training.replay import Task, replay_tasks
from eagle_trace_training.session import Session
from eagle_trace_training.twin import whole
from eagle_trace_training.weights import target_facts

#: prompts of which values are recorded beside another level
FEW = 2


class Probe:
    """A draft that trains, and how prompts are run through it.

    Args:
        host: the trainer.
        live: its draft.
        target: folder of the target; None where its features are given.
        features: ``compute``, ``serve`` or a folder of the trainer's training data, as for `record`.
        level: how much to keep of each row.
        device: where the target computes its features: ``cpu`` or ``cuda``; the draft runs where it trains.
        progress: receives messages.

    Raises:
        HostError: the installed release cannot be recorded, or this process holds only parts of the draft's parameters.
    """

    def __init__(
        self,
        host: TrainingHost,
        live: LiveDraft,
        *,
        target: Path | None,
        features: str,
        level: str,
        device: str,
        progress: Callable[[str], None],
    ) -> None:
        if not whole(live.draft):
            raise HostError(
                "the draft's parameters are sharded over ranks (FSDP), so that no process can run it by itself: train "
                "it replicated, or record its checkpoints with `eagle-trace record --mode train`"
            )
        self._warnings = host.check()
        self._host, self._live = host, live
        self._target, self._kind, self._level = target, features, level
        self._device, self._progress = resolve_device(device), progress
        self._features: Features | None = None
        self._tokens: dict[int, tuple[int, ...]] = {}

    @property
    def device(self) -> str:
        """Where the draft trains."""
        return str(self._live.draft.fc.weight.device.type)

    def prepare(self, served: Trace) -> None:
        """Make the features of a server's prompts, unless they are there.

        Raises:
            EagleTraceError: see `eagle_trace_training.features`.
        """
        tasks, _ = replay_tasks(served, None)
        self._prepare(served, tasks, self._twin(served))

    def record(self, served: Trace, out: Place, level: str | None = None) -> Place:
        """Run the server's prompts through the draft as it is now; returns the sealed trace's place.

        Nothing the training sees is changed: no gradient, no parameter or buffer, no random state, no mode, no hook.
        At another level than the one asked for, two prompts are run.
        """
        with torch.autocast(self.device, enabled=False):
            if level is None or level == self._level:
                return self._record(served, out, self._level, EVERYTHING)
            return self._record(served, out, level, Selection(prompts=((0, FEW),)))

    def tensors(self) -> dict[str, Any]:
        """The draft's parameters and vocabulary maps as they are now, by canonical names: torch tensors."""
        return {canonical_name(name): one.detach() for name, one in self._live.draft.state_dict().items()}

    def _twin(self, served: Trace) -> LoadedDraft:
        return self._live.twin(check_dtype(served.manifest.dtype or "bfloat16"), self._target)

    def _prepare(self, served: Trace, tasks: list[Task], draft: LoadedDraft) -> Features:
        tokens = {task.prompt_id: task.token_ids for task in tasks}
        if self._features is None or tokens != self._tokens:
            dtype = check_dtype(served.manifest.dtype or "bfloat16")
            with threads_for(self._device, draft.hidden_size):
                self._features = open_features(
                    self._kind,
                    host=self._host,
                    tasks=tasks,
                    replay=served,
                    target=self._target,
                    layer_ids=draft.layer_ids,
                    width=draft.fused_width,
                    precision=Precision(dtype, dtype, self._device),
                    progress=self._progress,
                )
            self._tokens = tokens
        return self._features

    def _record(self, served: Trace, out: Place, level: str, selection: Selection) -> Place:
        draft = self._twin(served)
        manifest = self._manifest(served, draft, level)
        tasks, steps = tasks_of(served, None, manifest)
        features = self._prepare(served, tasks, draft)
        manifest.settings = {
            "steps": steps, "features": self._kind, "replay": str(served.path), "prompts": None, "seed": 0,
            "replayed": served.manifest.recording, "trained": self._live.trained(),
        }  # fmt: skip
        if left_out := selection.to_dict():
            manifest.settings["selection"] = left_out
        manifest.prompts_digest = prompts_digest(keys_of(tasks))
        prepare_output(out, force=True)
        writer = TraceWriter(out, manifest, max_wait=None)
        try:
            with threads_for(self.device, draft.hidden_size):
                Session(
                    self._host,
                    draft,
                    tasks,
                    features,
                    steps,
                    manifest.dtype,
                    writer,
                    self._progress,
                    selection,
                    floors=False,
                ).run()
            return writer.seal()
        except BaseException as error:
            writer.abort(error)
            raise

    def _manifest(self, served: Trace, draft: LoadedDraft, level: str) -> Manifest:
        dtype = check_dtype(served.manifest.dtype or "bfloat16")
        manifest = Manifest(
            side="train",
            level=level,
            host=self._host.name,
            packages=package_versions(self._host),
            dtype=dtype,
            device=self.device,
            changes=self._host.changes(dtype),
            argv=without_secrets(sys.argv),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            warnings=list(self._warnings),
        )
        describe(self._live, manifest)
        if self._target is not None:
            manifest.target = target_facts(self._target)
        manifest.draft |= {"layer_ids": draft.layer_ids}
        return manifest


def stream_is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing else may run on the device then."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
