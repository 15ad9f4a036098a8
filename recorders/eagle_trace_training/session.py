"""One recording: every pack through the draft in the serving dtype, which is kept, and in the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from eagle_trace.capture import Rows
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.forward import TOPK, Forward, Forwards, offsets_to_ids
from eagle_trace.selection import EVERYTHING, Selection, select_prompts
from eagle_trace.writer import TraceWriter
from eagle_trace_training.documents import Document, Index, Pack, replayed, teacher_forced
from eagle_trace_training.features import ComputedFeatures, Features
from eagle_trace_training.floors import REFERENCE, Floors
from eagle_trace_training.forward import PackRunner, say_seen
from eagle_trace_training.host import LoadedDraft, TrainingHost
from eagle_trace_training.numerics import raise_dtype, row_budget
from eagle_trace_training.replay import Task
from eagle_trace_training.weights import parameter_rows


@dataclass
class Session:
    """Runs the draft on the documents of all tasks and hands what it captures to the writer.

    Attributes:
        host: the trainer.
        draft: its draft, loaded.
        tasks: the prompts.
        features: their target features.
        steps: number of forwards for prompts that are not replayed.
        dtype: serving dtype.
        writer: takes the captures.
        progress: receives messages.
        selection: which captures to keep.
        floors: whether to measure what rounding does, by a second pass in the reference dtype.
    """

    host: TrainingHost
    draft: LoadedDraft
    tasks: Sequence[Task]
    features: Features
    steps: int
    dtype: str
    writer: TraceWriter
    progress: Callable[[str], None]
    selection: Selection = EVERYTHING
    floors: bool = True

    def __post_init__(self) -> None:
        d2t = self.draft.model.d2t
        target_ids = None if d2t is None else offsets_to_ids(to_array(d2t))
        # every row of every site: how far rounding takes it is measured, whatever the trace keeps
        made = partial(Forwards, self.writer, self.selection, self.draft.hidden_size, target_ids, in_full=self.floors)
        self._forwards, self._reference = made(), made()

    @property
    def trees(self) -> bool:
        """Whether a replayed server drafted trees: two chains of one length below one root."""
        chains = [task.chains or () for task in self.tasks]
        return any(len({(root, len(path)) for root, path in one}) < len(one) for one in chains)

    def run(self) -> None:
        """Record everything: prompts, parameters, all packs, floors."""
        self._put_tables()
        wanted = set(select_prompts(1 + max(task.prompt_id for task in self.tasks), self.selection))
        documents = [one for task in self.tasks if task.prompt_id in wanted for one in self._documents(task)]
        reference = REFERENCE[self.dtype]
        budget = row_budget(self.draft.heads, self.steps, np.dtype(reference).itemsize)
        packs = list(self.host.packs(documents, budget))
        rows = sum(len(roots) for document in documents for roots in document.roots)
        both = f"{self.dtype} and {reference}" if self.floors else self.dtype
        self.progress(f"draft: {rows} rows in {len(packs)} forwards, {self.steps} steps, {both}")
        floors = Floors(self.dtype, reference)
        tasks = {task.prompt_id: task for task in self.tasks}
        with PackRunner(self.host, self.draft, self.dtype) as low, self._above(reference) as high:
            for number, batch in enumerate(packs):
                if not self.writer.accepting:
                    break
                kept = self._record(batch, tasks, low)
                if high is not None:
                    self._measure(batch, tasks, high, kept, floors)
                if (number + 1) % max(1, len(packs) // 10) == 0:
                    self.progress(f"draft: {number + 1} of {len(packs)} forwards")
        self._reference.stage.later(lambda: (("record", ("floors", record)) for record in floors.records()))
        self._reference.send()

    def _above(self, reference: str) -> AbstractContextManager[PackRunner | None]:
        """The draft in the reference dtype; None where no floor is measured."""
        if not self.floors:
            return nullcontext()
        upper = replace(self.draft, model=raise_dtype(copy.deepcopy(self.draft.model), reference))
        return PackRunner(self.host, upper, reference)

    def _documents(self, task: Task) -> list[Document]:
        count = self.features.count(task)
        if task.chains is None:
            return [teacher_forced(task.prompt_id, task.token_ids, count, self.steps)]
        # the first root a server drafts from is the prompt's last token
        first = max(0, int(task.record["num_prompt_tokens"]) - 1)
        return replayed(task.prompt_id, task.token_ids, count, task.chains, guess_from=first, steps=self.steps)

    def _put_tables(self) -> None:
        for task in self.tasks:
            self.writer.put_record("prompts", task.record)
        if isinstance(self.features, ComputedFeatures):
            self.writer.manifest.settings["layer_channels"] = self.features.layers.channels.tolist()
            for record in self.features.layers.records:
                self.writer.put_record("layers", record)
            if (routing := self.features.routing) is not None:
                self.writer.manifest.settings["routers"] = {"read": routing.layers, "unread": routing.unread}
                for record in routing.records():
                    self.writer.put_record("routing", record)
        for record in parameter_rows(self.draft.model, self.host.not_draft, self.draft.stored):
            self.writer.put_record("params", record)
            if record["nonfinite"]:
                self.writer.manifest.warnings.append(
                    f"{record['name']} holds {record['nonfinite']} values that are not finite: "
                    "it was never loaded, or is damaged"
                )

    def _record(self, batch: Pack, tasks: dict[int, Task], low: PackRunner) -> list[Forward]:
        first = self._forwards.calls
        # of a tree, all that would compete
        count = TOPK if self.trees else 1
        guesses = [
            (batch.rows(step, first + step, guesses=True), batch.index(step, guesses=True), count)
            for step in range(batch.steps)
        ]
        kept = self._opened(self._forwards, batch, first)
        low.run(batch, self._fused(batch, tasks, reference=False), kept, guesses)
        if not first:
            say_seen(self.writer.manifest, low.tap)
        for forward in kept:
            forward.close("train", len(batch.documents))
        return kept

    def _measure(
        self, batch: Pack, tasks: dict[int, Task], high: PackRunner, kept: Sequence[Forward], floors: Floors
    ) -> None:
        """The same pack in the reference dtype: how far rounding took what was kept."""
        reference = self._opened(self._reference, batch, kept[0].call)
        high.run(batch, self._fused(batch, tasks, reference=True), reference, ())

        def compare() -> None:
            for step, (one, other) in enumerate(zip(kept, reference, strict=True)):
                for (site, rows), (_, exact) in zip(one.arrays(), other.arrays(), strict=True):
                    floors.add(site, step, rows, exact)

        self._reference.stage.later(compare)
        self._reference.send()

    def _opened(self, forwards: Forwards, batch: Pack, first: int) -> list[Forward]:
        """Forwards of all steps of a pack, the first of them call `first`."""

        def keys(step: int) -> tuple[Rows, Index]:
            return batch.rows(step, first + step), batch.index(step)

        return [forwards.open(len(batch), partial(keys, step), call=first + step) for step in range(batch.steps)]

    def _fused(self, batch: Pack, tasks: dict[int, Task], *, reference: bool) -> Any:
        """Features of a pack [T, n * G]: each document's own, zeros behind them."""
        given: dict[int, Any] = {}
        fused = None
        for document, start in zip(batch.documents, batch.starts, strict=True):
            task = tasks[document.prompt_id]
            if task.prompt_id not in given:
                given[task.prompt_id] = self.features.rows(task, reference=reference)
            rows = given[task.prompt_id][: document.features]
            if fused is None:
                fused = torch.zeros(len(batch), self.draft.fused_width, dtype=rows.dtype)
            fused[start : start + len(rows)] = rows
        return fused
