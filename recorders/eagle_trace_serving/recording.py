"""One recording where the draft runs: from the requests it takes to the rows it hands to the writer.

A whole forward is handed over at once, so that a recording that ends between two sites of a call keeps none of that
call. The scheduler's thread runs everything here but `seal` and `abort`. A server's own package extends `Recording` by
what tells it of requests, forwards and rounds.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Shard
from eagle_trace.prompts import prompts_digest
from eagle_trace.recording.forward import Forward, Forwards
from eagle_trace.recording.stage import Task
from eagle_trace.streams import Part
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.admission import Admitted
from eagle_trace_serving.draft_rows import DraftCall, Index, RowTracker
from eagle_trace_serving.orders import Order


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
        ids = None if target_ids is None else target_ids()
        self._forwards = Forwards(writer, order.selection, target_width, ids, shard_of)
        self._stage = self._forwards.stage
        self._admitted = Admitted(order.admission)
        self._tracker = RowTracker()
        self._requests: dict[str, Any] = {}
        self._with_media = 0
        self._call: Forward | None = None
        self._mode, self._batch_size, self._draft_step = "", 0, 0
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
        number = self._admitted.ids[rid]
        self._stage.then(lambda: self._tracker.admit(rid, number))
        self._requests[rid] = request
        # written again when it has ended: a server that is killed in between leaves its rows with their prompt.
        # Digest and text of a long prompt take time, so the writer's thread makes them
        self.writer.put_record("prompts", partial(self._new_prompt, rid, request))
        return True

    def _leave(self, rid: str) -> None:
        """Record nothing more of a request."""
        if rid in self._requests and rid not in self._admitted.ended:
            self._admitted.ended.add(rid)
            self._stage.then(lambda: self._tracker.leave(rid))

    def _goes_on(self, rid: str) -> bool:
        """Whether a request is recorded and has not ended. The tracker may be told of it later."""
        return rid in self._requests and rid not in self._admitted.ended

    @property
    def done(self) -> bool:
        """Whether nothing is left to record: every request ended, or the byte budget is spent."""
        return self._admitted.done or (self.writer.failure is None and not self.writer.accepting)

    @property
    def counts(self) -> dict[str, int]:
        """Requests taken and ended, forwards and draft rows recorded so far."""
        admitted = self._admitted
        counts = {"requests": len(admitted.ids), "ended": len(admitted.ended)}
        return counts | {"calls": self._forwards.calls, "rows": self._forwards.rows}

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
        return self.writer.accepting and any(map(self._goes_on, rids))

    def _begin_call(
        self,
        mode: str,
        rids: Sequence[str],
        tokens: int,
        facts: Callable[[], DraftCall],
        *,
        picked: Callable[[], Index],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """The draft runs: take what is captured from now on as that of this forward.

        Args:
            mode: ``EXTEND``, ``DECODE`` or ``DRAFT_EXTEND_V2``; see `draft_rows`.
            rids: the requests [B].
            tokens: rows of the forward, T.
            facts: says what it is given, once all that was kept so far is known.
            picked: says which rows a tensor of fewer rows than tokens holds, one per request [B].
            lengths: rows of each request, where that is known without asking a device [B].
        """
        call = self._forwards.calls
        self._draft_step = self._draft_step + 1 if mode == "DECODE" else 0
        candidates = self._rows_of(rids, lengths, tokens) if self._stage.late else None
        self._call = self._forwards.open(
            tokens, lambda: self._tracker.rows(facts(), call), candidates=candidates, picked=picked
        )
        self._mode, self._batch_size = mode, len(rids)

    def _rows_of(self, rids: Sequence[str], lengths: Sequence[int] | None, tokens: int) -> Index | None:
        """Rows that may be kept, as far as is known at once; None for all rows, where nothing says which they are."""
        if not self.order.selection.wants_step(self._draft_step):
            return np.empty(0, dtype=np.intp)
        if lengths is None or len(lengths) != len(rids) or sum(lengths) != tokens:
            return None
        return np.flatnonzero(np.repeat([self._goes_on(rid) for rid in rids], lengths))

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site of the open call; `tensor` is the host's own and is copied at once."""
        if self._call is not None:
            self._call.take(site, tensor)

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
            call.close(self._mode, self._batch_size)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def _note(self, task: Task) -> None:
        """Do `task`, once all that was kept for it is known: here, or in the thread that writes."""
        self._stage.then(task)
        if not self._stage.late:
            self._forwards.send()

    def _close_round(
        self, rid: str, root: int, fed: int, kept: Sequence[int], tree: Mapping[str, Any]
    ) -> Iterator[Part]:
        """A verify round of a recorded request is over: to be noted (`_note`).

        Args:
            rid: the request.
            root: root that the round drafted from.
            fed: the token at place root + 1, which the round started from.
            kept: tokens it committed behind that: accepted ones, and the target's own.
            tree: ``proposed``, ``parents`` and ``target_argmax`` of rounds.parquet; rank 0 writes them down, the others
                only have to follow.
        """
        if rid not in self._tracker:
            return
        number = self._tracker.close_round(rid, root, [fed, *kept])
        if self._forwards.leads:
            record: dict[str, Any] = {"prompt_id": self._tracker.prompt_id(rid), "round": number, "root": root}
            record |= {"accepted": list(kept[:-1]), "bonus": kept[-1] if kept else -1}
            yield "record", ("rounds", record | dict(tree))

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
        rids = sorted(self._requests, key=self._admitted.ids.__getitem__)
        manifest.prompts_digest = prompts_digest([self._admitted.key(rid) for rid in rids])
        # what is known of the server stands
        manifest.settings = {**settings, **manifest.settings}
        self._stage.later(lambda: self._note_prompts(rids))
        self._forwards.send(settle=True)
        self.writer.seal(manifest.stopped or stopped)

    def _note_prompts(self, rids: Sequence[str]) -> list[Part]:
        """What became of the prompts, once all that came of them is known."""
        prompts = [self._prompt(rid, self._requests[rid]) for rid in rids]
        self._note_what_is_missing(prompts)
        return [("record", ("prompts", row)) for row in prompts]

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
