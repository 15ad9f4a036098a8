"""What is written of the batches of a training: prompts, rows, values, labels, metrics. Hangs no hook itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Rows
from eagle_trace.errors import UsageError
from eagle_trace.prompts import content_key, prompts_digest, unique_key
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.forward import Forward, Forwards, offsets_to_ids
from eagle_trace.recording.stage import Held
from eagle_trace.recording.wanted import Wanted
from eagle_trace.sites import ROW_SITES
from eagle_trace.store import Place
from eagle_trace.streams import Part
from eagle_trace.writer import TraceWriter
from eagle_trace_training.batches import Batch
from eagle_trace_training.documents import Index
from eagle_trace_training.first_tokens import UNKNOWN, FirstTokens
from eagle_trace_training.forward import feeds_another
from eagle_trace_training.host import LiveDraft

#: rows that are no data (their token is another document's, or padding) and that the loss counts all the same
LEAKING = "loss_rows_across_documents"


@dataclass(frozen=True)
class LiveOptions(Wanted):
    """What a recording of a training is asked to do; see `recording`."""

    out: Place
    batches: int = 2
    first_token: int | None = None
    datasets: tuple[Any, ...] = ()
    force: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches < 1:
            raise UsageError(f"batches must be 1 or more, not {self.batches}")
        if self.first_token is not None and self.first_token < 0:
            raise UsageError(f"first_token must be a token id, not {self.first_token}")


@dataclass
class _Begun:
    """One forward of the training.

    Attributes:
        number: of the forward.
        batch: what it was given; None as long as that is on its way.
        prompts: number of each of its documents.
        calls: call of each of its steps so far.
        labels: best ids of the verifier [T].
    """

    number: int
    tokens: int
    batch: Batch | None = None
    prompts: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    labels: Held | None = None

    @property
    def given(self) -> Batch:
        """What it was given, once that is known."""
        if self.batch is None:
            raise RuntimeError("a batch is asked for before it is known")
        return self.batch


class BatchTaker:
    """Takes what one forward after another shows, and writes it. Of no use to two forwards at once.

    On a device, nothing is known of a batch until the writer's thread has it: a batch of padding alone then counts.

    Args:
        live: the draft in training.
        writer: takes the captures.
        asked: what to keep.
        first_tokens: finds the first token of each document.

    Attributes:
        batches: forwards taken so far.
        full: whether the budget was spent in the middle of one.
    """

    def __init__(self, live: LiveDraft, writer: TraceWriter, asked: LiveOptions, first_tokens: FirstTokens) -> None:
        self._live, self._writer = live, writer
        self._first_tokens = first_tokens
        self._forwards = Forwards(writer, asked.selection, live.hidden_size)
        self._stage = self._forwards.stage
        self._seen: dict[str, int] = {}
        self._keys: list[str] = []
        self._unknown = 0
        self.batches = 0
        self.full = False
        self._begun: _Begun | None = None
        self._forward: Forward | None = None
        self._step = -1

    @property
    def open(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._begun is not None

    def read(self, given: Mapping[str, Any]) -> _Begun | None:
        """What a forward is given, by name; None if that is padding alone.

        Raises:
            HostError: it is not what this trainer's forward can be given.
        """
        held = {name: self._stage.keep(tensor) for name, tensor in self._live.given(given).items()}
        begun = _Begun(self.batches, given["input_ids"].numel())

        def known() -> None:
            begun.batch = self._live.batch({name: one.array for name, one in held.items()})

        self._stage.then(known)
        return begun if begun.batch is None or begun.batch.documents else None

    def begin(self, begun: _Begun, hidden_states: Any) -> None:
        """A forward begins.

        Args:
            begun: what it was given.
            hidden_states: the target's features, [..., n * G].
        """
        if not self._forwards.calls:
            d2t = self._live.draft.d2t
            self._forwards.target_ids = None if d2t is None else offsets_to_ids(to_array(d2t))
        self._begun, self._step, self.full = begun, -1, False
        self._stage.then(lambda: self._note_prompts(begun))
        self._enter(begun, 0)
        if self._forward is not None:
            self._forward.take_features(hidden_states)

    def take_targets(self, logits: Any) -> None:
        """The verifier's own logits over the draft vocabulary, [..., V]: their best ids are the labels."""
        if self._begun is not None and logits.shape[:-1].numel() == self._begun.tokens:
            self._begun.labels = self._stage.keep(logits.argmax(dim=-1).reshape(-1), fresh=True)

    def receive(self, step: int, site: str, tensor: Any) -> None:
        """A tensor [..., W] of a site, or ids [...]; rows that are data and wanted are kept."""
        if self._begun is None:
            return
        if step != self._step:
            self._enter(self._begun, step)
        if self._forward is None:
            return
        if site in ROW_SITES:
            self._forward.expect(site, tensor, lambda: feeds_another(self._writer.manifest.host, site, step))
            return
        if site == "fc.out":
            self._writer.manifest.dtype = str(tensor.dtype).removeprefix("torch.")
        self._forward.take(site, tensor)

    def end(self, output: Any) -> None:
        """The forward has returned `output`."""
        if self._begun is None:
            return
        self._keep_metrics(self._begun, output)
        self._leave(self._begun)
        self._forwards.send()
        self._begun = None
        self.batches += 1

    def close(self) -> None:
        """No more forwards: what is known of an unfinished one is written, and what was found out about all."""
        if self._begun is not None:
            self._leave(self._begun, settle=True)
            self._begun = None
        self._stage.later(self._note_all)
        self._forwards.send(settle=True)

    def _note_prompts(self, begun: _Begun) -> Iterator[Part]:
        for number, tokens in enumerate(begun.given.documents):
            known = begun.given.first
            first = self._first_tokens.find(tokens) if known is None else int(known[number])
            self._unknown += first == UNKNOWN
            ids = [first, *tokens.tolist()]
            begun.prompts.append(len(self._keys))
            self._keys.append(unique_key(content_key("input_ids", ids), self._seen))
            record = {
                "prompt_id": begun.prompts[-1],
                "prompt_key": self._keys[-1],
                "request_id": f"batch {begun.number}, document {number}",
                "token_ids": ids,
                "num_prompt_tokens": len(ids),
                "text": "",
                "output_ids": [],
            }
            yield "record", ("prompts", record)

    def _note_all(self) -> None:
        manifest = self._writer.manifest
        manifest.settings["recorded_batches"] = self.batches
        manifest.prompts_digest = prompts_digest(self._keys)
        if self._unknown:
            manifest.warnings.append(
                f"the first token of {self._unknown} of {len(self._keys)} documents is not known (training's "
                "shift drops it): token_ids begins with -1 there; give recording() dataset= or first_token="
            )

    def _enter(self, begun: _Begun, step: int) -> None:
        """A step begins."""
        self._leave(begun)
        self._step = step
        if not self._writer.accepting:
            self.full = True
            return
        call = self._forwards.calls

        def keys() -> tuple[Rows, Index]:
            index = begun.given.index(step)
            return begun.given.rows(step, index, begun.prompts, call), index

        none = None if self._forwards.selection.wants_step(step) else np.empty(0, dtype=np.intp)
        self._forward = self._forwards.open(begun.tokens, keys, candidates=none)

    def _leave(self, begun: _Begun, *, settle: bool = False) -> None:
        """A step is over: its call and its rows."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        step, labels = self._step, begun.labels
        begun.calls.append(forward.call)

        def training(_rows: Rows, index: Index) -> dict[str, Array]:
            counted = begun.given.counted(step, index)
            columns = {} if counted is None else {"loss_mask": counted}
            return columns if labels is None else columns | {"label": labels.array[index + step]}

        mode = "train" if self._live.draft.training else "eval"
        forward.close(mode, lambda: len(begun.prompts), training, settle=settle)

    def _keep_metrics(self, begun: _Begun, output: Any) -> None:
        kept = [
            (name, self._stage.keep(value) if hasattr(value, "detach") else float(value), step)
            for name, value, step in self._live.metrics(output)
        ]
        self._stage.later(lambda: _metrics(begun, kept))


def _metrics(begun: _Begun, kept: Sequence[tuple[str, Held | float, int | None]]) -> Iterator[Part]:
    """Rows of metrics.parquet of one forward."""

    def row(name: str, value: float, step: int | None) -> Part:
        call = begun.calls[step] if step is not None and step < len(begun.calls) else None
        record = {"batch": begun.number, "call_id": call, "step": step, "name": name, "value": value}
        return "record", ("metrics", record)

    for name, value, step in kept:
        yield row(name, float(value.array if isinstance(value, Held) else value), step)
    for step in range(1, len(begun.calls) if kept else 0):
        yield row(LEAKING, begun.given.leaking(step), step)
