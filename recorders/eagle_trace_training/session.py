"""One recording: every pack through the draft in the serving dtype, which is kept, and in the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from eagle_trace.capture import Array
from eagle_trace.recording.arrays import best_ids
from eagle_trace.selection import EVERYTHING, Selection, select_prompts
from eagle_trace.writer import TraceWriter
from eagle_trace_training.documents import Document, Pack, replayed, teacher_forced
from eagle_trace_training.features import ComputedFeatures, Features
from eagle_trace_training.floors import REFERENCE, Floors
from eagle_trace_training.forward import PackRunner, say_seen
from eagle_trace_training.host import LoadedDraft
from eagle_trace_training.numerics import raise_dtype, row_budget
from eagle_trace_training.replay import Task

TOPK = 10


def keeps_best(selection: Selection) -> bool:
    """Whether the best ids of rows (topk.parquet) are kept."""
    return selection.wants("topk.draft_id") or selection.wants("topk.target_id")


@dataclass
class Session:
    """Runs the draft on the documents of all tasks and hands what it captures to the writer.

    Attributes:
        draft: the loaded draft.
        tasks: the prompts.
        features: their target features.
        steps: number of forwards for prompts that are not replayed.
        dtype: serving dtype.
        writer: takes the captures.
        progress: receives messages.
        selection: which captures to keep.
    """

    draft: LoadedDraft
    tasks: Sequence[Task]
    features: Features
    steps: int
    dtype: str
    writer: TraceWriter
    progress: Callable[[str], None]
    selection: Selection = EVERYTHING
    _next_call: int = 0

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
        packs = list(self.draft.host.packs(documents, budget))
        rows = sum(len(roots) for document in documents for roots in document.roots)
        self.progress(f"draft: {rows} rows in {len(packs)} forwards, {self.steps} steps, {self.dtype} and {reference}")
        floors = Floors(self.dtype, reference)
        upper = replace(self.draft, model=raise_dtype(copy.deepcopy(self.draft.model), reference))
        tasks = {task.prompt_id: task for task in self.tasks}
        with PackRunner(self.draft, self.dtype) as low, PackRunner(upper, reference) as high:
            for number, batch in enumerate(packs):
                if not self.writer.accepting:
                    break
                self._record(batch, tasks, low, high, floors)
                if (number + 1) % max(1, len(packs) // 10) == 0:
                    self.progress(f"draft: {number + 1} of {len(packs)} forwards")
        for record in floors.records():
            self.writer.put_record("floors", record)

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
            for record in self.features.layers.records:
                self.writer.put_record("layers", record)
        for record in self.draft.host.params(self.draft.model, self.draft.stored):
            self.writer.put_record("params", record)
            if record["nonfinite"]:
                self.writer.manifest.warnings.append(
                    f"{record['name']} holds {record['nonfinite']} values that are not finite: "
                    "it was never loaded, or is damaged"
                )

    def _record(self, batch: Pack, tasks: dict[int, Task], low: PackRunner, high: PackRunner, floors: Floors) -> None:
        captured: dict[tuple[int, str], Array] = {}

        def keep(step: int, site: str, rows: Array) -> None:
            captured[step, site] = rows

        def compare(step: int, site: str, rows: Array) -> None:
            floors.add(site, step, captured[step, site], rows)

        shapes = low.run(batch, self._fused(batch, tasks, reference=False), keep)
        if not self._next_call:
            say_seen(self.writer.manifest, low.tap)
        high.run(batch, self._fused(batch, tasks, reference=True), compare)
        for step in range(batch.steps):
            rows = batch.rows(step, self._next_call)
            kept = np.flatnonzero(self.selection.mask(rows))
            call = {
                "call_id": self._next_call,
                "role": "draft",
                "mode": "train",
                "batch_size": len(batch.documents),
            }
            self.writer.put_record("calls", call | {"tokens": len(batch), "shapes": shapes[step]})
            if len(kept) < len(rows):
                rows = rows.take(kept)
                captured |= {key: values[kept] for key, values in captured.items() if key[0] == step}
            self.writer.put_rows(rows)
            for entry in shapes[step]:
                if self.selection.wants(entry["site"]):
                    self.writer.put_values(entry["site"], rows, captured[step, entry["site"]])
            if len(rows) and keeps_best(self.selection) and self.writer.manifest.level != "shapes":
                draft_ids, logits, logprobs = best_ids(captured[step, "logits"], TOPK)
                self.writer.put_topk(rows, draft_ids, self._target_ids(draft_ids), logits, logprobs)
            self._put_guesses(batch, step, low.guesses.get(step))
            self._next_call += 1

    def _put_guesses(self, batch: Pack, step: int, logits: Array | None) -> None:
        """Best ids along the true tokens where the server drafted others: no rows, no values, only these."""
        if logits is None or not keeps_best(self.selection) or self.writer.manifest.level == "shapes":
            return
        # of a tree, all that would compete
        draft_ids, scores, logprobs = best_ids(logits, TOPK if self.trees else 1)
        rows = batch.rows(step, self._next_call, guesses=True)
        if not self.selection.all_rows:
            kept = np.flatnonzero(self.selection.mask(rows))
            rows, draft_ids, scores, logprobs = rows.take(kept), draft_ids[kept], scores[kept], logprobs[kept]
        self.writer.put_topk(rows, draft_ids, self._target_ids(draft_ids), scores, logprobs)

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

    def _target_ids(self, draft_ids: Array) -> Array:
        d2t = self.draft.model.d2t
        return draft_ids if d2t is None else draft_ids + d2t.cpu().numpy()[draft_ids]
