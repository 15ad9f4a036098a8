"""One recording where the draft runs: from the requests it takes to the rows it hands to the writer.

A whole forward is handed over at once, so that a recording that ends between two sites of a call keeps none of that
call. The scheduler's thread runs everything here but `seal` and `abort`. A server's own package extends `Recording` by
what tells it of requests, forwards and rounds.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Rows, Shard
from eagle_trace.prompts import prompts_digest
from eagle_trace.recording.arrays import best_ids, capture_rows, to_rows
from eagle_trace.sites import fused_slices
from eagle_trace.sketch import Reduced
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.admission import Admitted
from eagle_trace_serving.draft_rows import DraftCall, Index, RowTracker
from eagle_trace_serving.orders import Order

TOPK = 10


@dataclass(frozen=True)
class Exchange:
    """What is known of a request.

    Attributes:
        prompt, answer: token ids.
        finish_reason: why the answer ended; None as long as it goes on.
        tokenizer: makes text of token ids; None where there is none.
    """

    prompt: Sequence[int]
    answer: Sequence[int] = ()
    finish_reason: str | None = None
    tokenizer: Any = None


@dataclass
class _Call:
    """One forward of the draft that is being captured."""

    facts: DraftCall
    rows: Rows
    index: Index
    whole: bool
    #: rows of the call that a tensor of fewer rows than tokens holds, one a request
    picked: Index
    captures: dict[str, Array | Reduced] = field(default_factory=dict)
    #: sites of which there are only the rows `picked`
    at_picked: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[list[int], str]] = field(default_factory=dict)


class Recording(ABC):
    """Takes requests, captures the draft's forwards of them, writes the trace.

    Args:
        order: what to record.
        writer: takes the rows.
        shard_of: which part of a site's last axis this rank computes; None where it computes all of it.
        target_width: width of one target layer's features.
        target_ids: the target's id of each of the draft's [draft vocabulary], or None where they are the same.
    """

    def __init__(
        self,
        order: Order,
        writer: TraceWriter,
        shard_of: Callable[[str], Shard | None],
        target_width: int,
        target_ids: Callable[[], Array] | None,
    ) -> None:
        self.order = order
        self.writer = writer
        self.calls = 0
        self.rows = 0
        self._shard_of = cache(shard_of)
        self._wanted = cache(self._is_wanted)
        self._target_width = target_width
        self._target_ids = target_ids
        self._admitted = Admitted(order.admission)
        self._tracker = RowTracker()
        self._requests: dict[str, Any] = {}
        self._with_media = 0
        self._call: _Call | None = None
        # rows go out and the recording is closed from different threads
        self._lock = threading.Lock()
        self._closed = False

    # ---- requests ---------------------------------------------------------------------------------------------

    @abstractmethod
    def arrived(self, request: Any) -> None:
        """A request was queued: `_take` it."""

    @abstractmethod
    def ended(self, request: Any) -> None:
        """A request was answered or aborted: `_leave` it."""

    @abstractmethod
    def exchange(self, request: Any) -> Exchange:
        """What is known of a request by now."""

    def _take(self, rid: str, request: Any, prompt: Sequence[int], *, media: bool = False) -> bool:
        """Record a request if it is one to record; whether it is. One with `media` is passed over and counted: the
        embeddings of its image are in no trace, so training could not be given them.
        """
        if media:
            self._with_media += self._admitted.admission.wants(rid)
            return False
        if not self._admitted.take(rid, prompt):
            return False
        self._tracker.admit(rid, self._admitted.ids[rid])
        self._requests[rid] = request
        # written again when it has ended: a server that is killed in between leaves its rows with their prompt.
        # Digest and text of a long prompt take time, so the writer's thread makes them
        self.writer.put_record("prompts", partial(self._new_prompt, rid, request))
        return True

    def _leave(self, rid: str) -> None:
        """Record nothing more of a request."""
        if rid in self._requests and rid not in self._admitted.ended:
            self._admitted.ended.add(rid)
            self._tracker.leave(rid)

    @property
    def done(self) -> bool:
        """Whether nothing is left to record: every request ended, or the byte budget is spent."""
        return self._admitted.done or (self.writer.failure is None and not self.writer.accepting)

    @property
    def counts(self) -> dict[str, int]:
        """Requests taken and ended, forwards and draft rows recorded so far."""
        admitted = self._admitted
        counts = {"requests": len(admitted.ids), "ended": len(admitted.ended)}
        return counts | {"calls": self.calls, "rows": self.rows}

    @property
    def outcome(self) -> dict[str, Any]:
        """The counts of a sealed recording, what this rank wrote of it, and why it ended early."""
        manifest = self.writer.manifest
        written = sum(facts["bytes"] for facts in manifest.files.values()) + len(manifest.to_bytes())
        files = {"bytes": written, "files": len(manifest.files) + 1}
        return self.counts | files | {"stopped": manifest.stopped, "waited_seconds": manifest.waited_seconds}

    def _new_prompt(self, rid: str, request: Any) -> dict[str, Any]:
        """What is known of a request before it is computed; nothing here changes while it is."""
        said = self.exchange(request)
        prompt = list(said.prompt)
        return {
            "prompt_id": self._admitted.ids[rid],
            "prompt_key": self._admitted.key(rid),
            "request_id": rid,
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt),
            "text": _text(said.tokenizer, prompt, []),
            "output_ids": [],
            "cached_tokens": 0,
            "finish_reason": None,
        }

    def _prompt(self, rid: str, request: Any) -> dict[str, Any]:
        said = self.exchange(request)
        prompt, answer = list(said.prompt), list(said.answer)
        return self._new_prompt(rid, request) | {
            "token_ids": self._tracker.committed(rid, prompt, answer),
            "text": _text(said.tokenizer, prompt, answer),
            "output_ids": answer,
            "cached_tokens": self._tracker.first_root(rid),
            "finish_reason": said.finish_reason,
        }

    # ---- one forward of the draft -----------------------------------------------------------------------------

    def _is_recorded(self, rids: Sequence[str]) -> bool:
        """Whether a forward of these requests is one to capture."""
        return self.writer.accepting and any(rid in self._tracker for rid in rids)

    def _begin_call(self, facts: DraftCall, picked: Index) -> None:
        """The draft runs: take what is captured from now on as that of this forward.

        Args:
            facts: what it is given.
            picked: which rows a tensor of fewer rows than tokens holds, one per request [B].
        """
        rows, index = self._tracker.rows(facts, self.calls)
        if not self.order.selection.all_rows:
            kept = np.flatnonzero(self.order.selection.mask(rows))
            rows, index = rows.take(kept), index[kept]
        self._call = _Call(facts, rows, index, len(index) == len(facts.input_ids), picked)

    def _capture_fused(self, hidden: Any) -> None:
        """Keep the target's features, side by side [T, n*G]."""
        self.capture("fused", hidden)
        if self._call is not None:
            shapes = self._call.shapes
            for name, columns in fused_slices(hidden.shape[-1], self._target_width):
                shapes[name] = ([hidden.shape[0], columns.stop - columns.start], shapes["fused"][1])

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site of the open call; `tensor` is the host's own and is copied at once."""
        call = self._call
        if call is None:
            return
        shard, shape = self._shard_of(site), list(tensor.shape)
        if shard is not None:
            shape[-1] *= shard.count
        call.shapes[site] = (shape, str(tensor.dtype).removeprefix("torch."))
        if self.order.level == "shapes" or not self._wanted(site, tensor.shape[-1]):
            return
        if len(tensor) != len(call.facts.input_ids):
            call.at_picked.add(site)
        elif not call.whole:
            tensor = tensor[_torch_index(call.index, tensor)]
        # `_write` takes parts of these: slices by target layer, the best ids, rows of some requests
        whole = site in ("fused", "logits") or site in call.at_picked
        call.captures[site] = to_rows(tensor) if whole else capture_rows(tensor, self.order.level, shard)

    def close_call(self) -> None:
        """The forward is over: hand its rows to the writer.

        Raises:
            Exception: whatever the writer failed with, so that the recording ends.
        """
        call, self._call = self._call, None
        with self._lock:
            if call is None or self._closed:
                return
            if self.writer.failure is not None:
                raise self.writer.failure
            with self.writer.together(self.calls):
                self._write(call)
            self.calls += 1
            self.rows += len(call.rows)

    def _is_wanted(self, site: str, width: int) -> bool:
        """Whether a site, or something made of it, is kept."""
        wants = self.order.selection.wants
        made = {"fused": [name for name, _ in fused_slices(width, self._target_width)], "logits": ["topk.draft_id"]}
        return any(wants(name) for name in (site, *made.get(site, [])))

    def _write(self, call: _Call) -> None:
        writer, wants = self.writer, self.order.selection.wants
        facts, rows = call.facts, call.rows
        writer.put_rows(rows)
        fused = call.captures.get("fused")
        if isinstance(fused, np.ndarray):
            for name, columns in fused_slices(fused.shape[-1], self._target_width):
                if wants(name):
                    writer.put_values(name, rows, np.ascontiguousarray(fused[:, columns]))
        for site, values in call.captures.items():
            at, kept = rows, values
            if isinstance(values, np.ndarray) and site in call.at_picked:
                # a prefill has logits for the last row of each request only
                position = {int(row): number for number, row in enumerate(call.index)}
                pairs = [(position[int(row)], b) for b, row in enumerate(call.picked) if int(row) in position]
                at = rows.take(np.array([row for row, _ in pairs], dtype=np.intp))
                kept = np.ascontiguousarray(values[[b for _, b in pairs]])
            if wants(site):
                writer.put_values(site, at, kept, self._shard_of(site))
            # logits are gathered, so the best ids are the same on every rank
            leads = not writer.manifest.tp_rank
            if site == "logits" and isinstance(kept, np.ndarray) and leads and wants("topk.draft_id"):
                self._write_topk(at, kept)
        shapes = [{"site": site, "shape": shape, "dtype": dtype} for site, (shape, dtype) in call.shapes.items()]
        record = {"call_id": self.calls, "role": "draft", "mode": facts.mode, "shapes": shapes}
        writer.put_record("calls", record | {"batch_size": len(facts.rids), "tokens": len(facts.input_ids)})

    def _write_topk(self, rows: Rows, logits: Array) -> None:
        draft_ids, scores, logprobs = best_ids(logits, TOPK)
        target_ids = draft_ids if self._target_ids is None else self._target_ids()[draft_ids]
        self.writer.put_topk(rows, draft_ids, target_ids, scores, logprobs)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def _close_round(self, rid: str, root: int, fed: int, kept: Sequence[int], tree: Mapping[str, Any]) -> None:
        """A verify round of a recorded request is over.

        Args:
            rid: the request.
            root: root that the round drafted from.
            fed: the token at place root + 1, which the round started from.
            kept: tokens it committed behind that: accepted ones, and the target's own.
            tree: ``proposed``, ``parents`` and ``target_argmax`` of rounds.parquet; rank 0 writes them down, the others
                only have to follow.
        """
        number = self._tracker.close_round(rid, root, [fed, *kept])
        if self.writer.manifest.tp_rank:
            return
        record: dict[str, Any] = {"prompt_id": self._tracker.prompt_id(rid), "round": number, "root": root}
        record |= {"accepted": list(kept[:-1]), "bonus": kept[-1] if kept else -1}
        self.writer.put_record("rounds", record | dict(tree))

    # ---- the end ----------------------------------------------------------------------------------------------

    def seal(self, settings: dict[str, Any], stopped: str | None = None) -> None:
        """Write what is left and the seal; no row is taken any more.

        Args:
            settings: added to the manifest's.
            stopped: why the recording ends before its requests did.

        Raises:
            RecordingError: something could not be written.
        """
        with self._lock:
            self._closed = True
        manifest = self.writer.manifest
        rows = sorted((self._prompt(*item) for item in self._requests.items()), key=lambda row: row["prompt_id"])
        for row in rows:
            self.writer.put_record("prompts", row)
        manifest.prompts_digest = prompts_digest([row["prompt_key"] for row in rows])
        # what is known of the server stands
        manifest.settings = {**settings, **manifest.settings}
        self._note_what_is_missing(rows)
        self.writer.seal(manifest.stopped or stopped)

    def _note_what_is_missing(self, prompts: list[dict[str, Any]]) -> None:
        manifest = self.writer.manifest
        if self._with_media:
            rows = f"{self._with_media} requests that came with an image, a video or sound"
            why = "training is given tokens alone, so these were passed over: record the prompts as text"
            manifest.not_materialised.append({"site": "*", "rows": rows, "why": why})
        cached = {row["prompt_id"]: row["cached_tokens"] for row in prompts if row["cached_tokens"]}
        if cached:
            rows = f"the first rows of {len(cached)} prompts ({sum(cached.values())} rows)"
            why = "the server took these positions from its prefix cache and computed nothing for them"
            manifest.not_materialised.append({"site": "*", "rows": rows, "why": why})
        aborted = sum(row["finish_reason"] == "abort" for row in prompts)
        if aborted:
            manifest.warnings.append(f"{aborted} of {len(prompts)} requests were aborted before their answer was done")
        manifest.warnings += self._tracker.warnings

    def abort(self, error: BaseException) -> None:
        """Give the recording up; what is whole stays on disk, unsealed."""
        with self._lock:
            self._closed = True
        self.writer.abort(error)


def _text(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    """Prompt and answer as text, or nothing where the server runs without a tokenizer."""
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(prompt)) + str(tokenizer.decode(answer, skip_special_tokens=True))


def _torch_index(index: Index, like: Any) -> Any:
    """`index` as a torch index on the device of `like`."""
    import torch

    return torch.from_numpy(index).to(like.device)
