"""What is written of the batches of a training: prompts, rows, values, labels, metrics. Hangs no hook itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle_trace.capture import LEVELS, Array, Rows
from eagle_trace.errors import UsageError
from eagle_trace.patience import MAX_WAIT, check_wait
from eagle_trace.prompts import content_key, unique_key
from eagle_trace.recording.arrays import best_ids, to_array
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.sites import fused_slices
from eagle_trace.store import Place
from eagle_trace.writer import TraceWriter
from eagle_trace_training.batches import Batch
from eagle_trace_training.first_tokens import UNKNOWN, FirstTokens
from eagle_trace_training.forward import INTEGER_SITES, feeds_another
from eagle_trace_training.host import LiveDraft
from eagle_trace_training.session import TOPK, keeps_best

#: rows that are no data (their token is another document's, or padding) and that the loss counts all the same
LEAKING = "loss_rows_across_documents"


@dataclass(frozen=True)
class LiveOptions:
    """What a recording of a training is asked to do; see `recording`."""

    out: Place
    batches: int = 2
    level: str = "values"
    selection: Selection = EVERYTHING
    max_bytes: int | None = None
    first_token: int | None = None
    datasets: tuple[Any, ...] = ()
    force: bool = False
    max_wait: float = MAX_WAIT

    def check(self) -> None:
        """Raises UsageError if the options do not make sense."""
        if self.batches < 1:
            raise UsageError(f"batches must be 1 or more, not {self.batches}")
        if self.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {self.level!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"max_bytes must be a positive number of bytes, not {self.max_bytes}")
        if self.first_token is not None and self.first_token < 0:
            raise UsageError(f"first_token must be a token id, not {self.first_token}")
        check_wait(self.max_wait)


class BatchTaker:
    """Takes what one forward after another shows, and writes it. Of no use to two forwards at once.

    Args:
        live: the draft in training.
        writer: takes the captures.
        asked: what to keep.
        first_tokens: finds the first token of each document.

    Attributes:
        keys: keys of the prompts so far.
        unknown: how many of them have a first token that is not known.
        batches: forwards taken so far.
        full: whether the budget was spent in the middle of one.
    """

    def __init__(self, live: LiveDraft, writer: TraceWriter, asked: LiveOptions, first_tokens: FirstTokens) -> None:
        self._live, self._writer, self._asked = live, writer, asked
        self._first_tokens = first_tokens
        self._seen: dict[str, int] = {}
        self._calls = 0
        self.keys: list[str] = []
        self.unknown = 0
        self.batches = 0
        self.full = False
        self._batch: Batch | None = None
        self._prompts: list[int] = []
        self._call_of: list[int] = []
        self._labels: Array | None = None
        self._step = -1
        self._rows: Rows | None = None
        self._at = np.empty(0, dtype=np.intp)
        self._index: Any = None
        self._device: Any = None
        self._shapes: list[dict[str, Any]] = []

    @property
    def open(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._batch is not None

    def begin(self, batch: Batch, hidden_states: Any) -> None:
        """A forward begins.

        Args:
            batch: what it was given.
            hidden_states: the target's features, [..., n * G].
        """
        self._prompts = [self._put_prompt(number, tokens, batch) for number, tokens in enumerate(batch.documents)]
        self._batch, self._labels, self._call_of, self._step, self.full = batch, None, [], -1, False
        self._device = hidden_states.device
        for name, columns in fused_slices(hidden_states.shape[-1], self._live.hidden_size):
            self.receive(0, name, hidden_states[..., columns])
        self.receive(0, "fused", hidden_states)

    def take_targets(self, logits: Any) -> None:
        """The verifier's own logits over the draft vocabulary, [..., V]: their best ids are the labels."""
        if self._batch is not None and logits.shape[:-1].numel() == len(self._batch):
            self._labels = to_array(logits.argmax(dim=-1).reshape(-1), copy=False)

    def receive(self, step: int, site: str, tensor: Any) -> None:
        """A tensor [..., W] of a site, or ids [...]; rows that are data and wanted are kept."""
        if self._batch is None:
            return
        if step != self._step:
            self._enter(self._batch, step)
        if self._rows is None:
            return
        flat = tensor.reshape(-1) if site in INTEGER_SITES else tensor.reshape(-1, tensor.shape[-1])
        if site in INTEGER_SITES:
            expected = self._rows.token_id if site == "token" else self._rows.position
            if not np.array_equal(to_array(flat.index_select(0, self._index), copy=False), expected):
                raise feeds_another(self._live.host.name, site, step)
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._shapes.append({"site": site, "shape": list(flat.shape), "dtype": dtype})
        if site == "fc.out":
            self._writer.manifest.dtype = dtype
        kept = self._asked.selection.wants(site)
        best = site == "logits" and keeps_best(self._asked.selection)
        if self._asked.level == "shapes" or not (kept or best) or not len(self._rows):
            return
        values = to_array(flat.index_select(0, self._index), copy=False)
        if best:
            draft_ids, logits, logprobs = best_ids(values, TOPK)
            self._writer.put_topk(self._rows, draft_ids, self._target_ids(draft_ids), logits, logprobs)
        if kept:
            self._writer.put_values(site, self._rows, values)

    def end(self, output: Any) -> None:
        """The forward has returned `output`."""
        if self._batch is None:
            return
        self._leave()
        self._put_metrics(self._batch, output)
        self._batch = None
        self.batches += 1

    def close(self) -> None:
        """No more forwards: what is known of an unfinished one is written."""
        self._leave()
        self._batch = None

    def _put_prompt(self, number: int, tokens: Array, batch: Batch) -> int:
        prompt = len(self.keys)
        first = self._first_tokens.find(tokens) if batch.first is None else int(batch.first[number])
        self.unknown += first == UNKNOWN
        ids = [first, *tokens.tolist()]
        self.keys.append(unique_key(content_key("input_ids", ids), self._seen))
        record = {
            "prompt_id": prompt,
            "prompt_key": self.keys[-1],
            "request_id": f"batch {self.batches}, document {number}",
            "token_ids": ids,
            "num_prompt_tokens": len(ids),
            "text": "",
            "output_ids": [],
        }
        self._writer.put_record("prompts", record)
        return prompt

    def _enter(self, batch: Batch, step: int) -> None:
        """A step begins: decide which of its rows to keep."""
        self._leave()
        self._step = step
        if not self._writer.accepting:
            self.full = True
            return
        index = batch.index(step)
        rows = batch.rows(step, index, self._prompts, self._calls)
        kept = np.flatnonzero(self._asked.selection.mask(rows))
        self._rows, self._at, self._shapes = rows.take(kept), index[kept], []
        self._index = torch.from_numpy(self._at).to(self._device)

    def _leave(self) -> None:
        """A step is over: its call and its rows."""
        batch, rows, self._rows = self._batch, self._rows, None
        if batch is None or rows is None:
            return
        call = self._calls
        self._calls += 1
        self._call_of.append(call)
        mode = "train" if self._live.draft.training else "eval"
        shared = {"call_id": call, "role": "draft", "mode": mode, "shapes": self._shapes}
        self._writer.put_record("calls", shared | {"batch_size": len(self._prompts), "tokens": len(batch)})
        training: dict[str, Array] = {}
        if (counted := batch.counted(self._step, self._at)) is not None:
            training["loss_mask"] = counted
        if self._labels is not None:
            training["label"] = self._labels[self._at + self._step]
        self._writer.put_rows(rows, training)

    def _put_metrics(self, batch: Batch, output: Any) -> None:
        def put(name: str, value: float, step: int | None = None) -> None:
            call = self._call_of[step] if step is not None and step < len(self._call_of) else None
            record = {"batch": self.batches, "call_id": call, "step": step, "name": name, "value": value}
            self._writer.put_record("metrics", record)

        metrics = list(self._live.metrics(output))
        for name, value, step in metrics:
            put(name, value, step)
        for step in range(1, len(self._call_of) if metrics else 0):
            put(LEAKING, batch.leaking(step), step)

    def _target_ids(self, draft_ids: Array) -> Array:
        d2t = self._live.draft.d2t
        return draft_ids if d2t is None else draft_ids + to_array(d2t, copy=False)[draft_ids]
