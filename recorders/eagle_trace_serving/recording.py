"""One recording where the draft runs: from the requests it takes to the rows it hands to the writer.

A whole forward is handed over at once, so that a recording that ends between two sites of a call keeps none of that
call. The scheduler's thread runs everything here but `seal` and `abort`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Shard
from eagle_trace.prompts import prompts_digest
from eagle_trace.recording.forward import Forward, Forwards
from eagle_trace.recording.stage import Held
from eagle_trace.streams import Part
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.admission import Admitted
from eagle_trace_serving.batches import Batch, ServedRequest, Verified
from eagle_trace_serving.draft_rows import DraftCall, Index, RowTracker, tree_parents
from eagle_trace_serving.orders import Order


class Recording:
    """Takes requests, captures the draft's forwards of them, writes the trace.

    Args:
        order: what to record.
        writer: takes the rows.
        target_width: width of one target layer's features.
        target_ids: target id of each draft id [draft vocabulary]; None where they are the same.
        shards: which part of a site's last axis this rank computes, for sites of which it computes a part.
    """

    def __init__(
        self,
        order: Order,
        writer: TraceWriter,
        target_width: int,
        target_ids: Array | None = None,
        shards: Mapping[str, Shard | None] = MappingProxyType({}),
    ) -> None:
        self.order = order
        self.writer = writer
        self._forwards = Forwards(writer, order.selection, target_width, target_ids, shards.get)
        self._stage = self._forwards.stage
        self._admitted = Admitted(order.admission)
        self._tracker = RowTracker()
        self._requests: dict[str, ServedRequest] = {}
        self._with_media = 0
        self._forward: Forward | None = None
        self._mode, self._batch_size, self._draft_step = "", 0, 0
        #: what the draft chose for its next step: tokens, parents of the branches in a tree, and how to read those
        self._chosen: tuple[Held, Held | None, Callable[[Array], Array]] | None = None
        # rows go out and the recording is closed from different threads
        self._lock = threading.Lock()
        self._closed = False

    # ---- requests ---------------------------------------------------------------------------------------------

    def arrived(self, request: ServedRequest) -> None:
        """A request was queued.

        One with an image is passed over and counted: what is made of the image is in no trace, so training could not be
        given it.
        """
        rid = request.rid
        if request.has_media:
            self._with_media += self._admitted.admission.wants(rid)
        elif self._admitted.take(rid, request.prompt_ids):
            number = self._admitted.ids[rid]
            self._stage.then(lambda: self._tracker.admit(rid, number))
            self._requests[rid] = request
            # written again when it has ended: a server that is killed in between leaves its rows with their prompt.
            # Digest and text of a long prompt take time, so the writer's thread makes them
            self.writer.put_record("prompts", partial(self._new_prompt, rid, request))

    def ended(self, rid: str) -> None:
        """A request was answered or aborted."""
        if self._goes_on(rid):
            self._admitted.ended.add(rid)
            self._stage.then(lambda: self._tracker.leave(rid))

    def _goes_on(self, rid: str) -> bool:
        """Whether a request is recorded and has not ended."""
        return rid in self._requests and rid not in self._admitted.ended

    def request(self, rid: str) -> ServedRequest | None:
        """A request that is recorded and has not ended."""
        return self._requests[rid] if self._goes_on(rid) else None

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

    def _new_prompt(self, rid: str, request: ServedRequest) -> dict[str, Any]:
        """What is known of a request before it is computed; nothing here changes while it is."""
        prompt = list(request.prompt_ids)
        return {
            "prompt_id": self._admitted.ids[rid],
            "prompt_key": self._admitted.key(rid),
            "request_id": rid,
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt),
            "text": request.text(prompt, []),
            "output_ids": [],
            "cached_tokens": 0,
            "finish_reason": None,
        }

    def _prompt(self, rid: str, request: ServedRequest) -> dict[str, Any]:
        prompt, answer = list(request.prompt_ids), list(request.answer_ids)
        return self._new_prompt(rid, request) | {
            "token_ids": self._tracker.committed(rid, prompt, answer),
            "text": request.text(prompt, answer),
            "output_ids": answer,
            "cached_tokens": self._tracker.first_root(rid),
            "finish_reason": request.finish_reason,
        }

    # ---- one forward of the draft -----------------------------------------------------------------------------

    def open_call(self, batch: Batch | None) -> None:
        """The draft is about to run `batch`; None for one in which nothing of a request is computed."""
        self._forward = None
        if batch is None or not self.is_recorded(batch.rids):
            return
        call, kind = self._forwards.calls, batch.kind
        self._draft_step = self._draft_step + 1 if kind == "step" else 0
        kept = {name: self._keep(tensor) for name, tensor in batch.tensors.items() if tensor is not None}
        facts = cache(lambda: DraftCall(kind, batch.rids, **{name: held.array for name, held in kept.items()}))
        if kind == "step" and self._chosen is not None:
            self._stage.then(self._choose(*self._chosen))
            self._chosen = None

        def picked() -> Index:
            known = facts()
            if batch.picked is not None:
                return batch.picked
            return known.last_rows if known.extend_lens is not None else np.arange(len(batch.rids), dtype=np.intp)

        self._forward = self._forwards.open(
            batch.rows,
            lambda: self._tracker.rows(facts(), call),
            candidates=self._candidates(batch) if self._stage.late else None,
            picked=picked,
        )
        self._mode, self._batch_size = batch.mode, len(batch.rids)
        if batch.features is not None:
            self._forward.take_features(batch.features)

    def is_recorded(self, rids: Iterable[str]) -> bool:
        """Whether a forward of these requests is one to capture."""
        return self.writer.accepting and any(map(self._goes_on, rids))

    def _keep(self, tensor: Any) -> Held:
        return Held(tensor, None, tensor.nbytes) if isinstance(tensor, np.ndarray) else self._stage.keep(tensor)

    def _candidates(self, batch: Batch) -> Index | None:
        """Rows that may be kept, by what is known without asking a device; None for all."""
        if not self.order.selection.wants_step(self._draft_step):
            return np.empty(0, dtype=np.intp)
        lengths = batch.lengths
        if lengths is None or len(lengths) != len(batch.rids) or sum(lengths) != batch.rows:
            return None
        return np.flatnonzero(np.repeat([self._goes_on(rid) for rid in batch.rids], lengths))

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site of the open call; `tensor` is the host's own and is copied at once."""
        if self._forward is not None:
            self._forward.take(site, tensor)

    def replayed(self, batch: Batch | None, select_index: Any, sites: Mapping[str, Any]) -> None:
        """A CUDA graph was replayed for `batch`: `sites` are those of the rows at `select_index` [B] only."""
        self.open_call(batch)
        if self._forward is not None:
            index = self._stage.keep(select_index)
            self._forward.picked = lambda: index.array.astype(np.intp)
            for site, tensor in sites.items():
                self.capture(site, tensor)
            self.close_call()

    def close_call(self) -> None:
        """The forward is over: hand its rows to the writer.

        Raises:
            Exception: whatever the writer failed with, so that the recording ends.
        """
        forward, self._forward = self._forward, None
        with self._lock:
            if forward is None or self._closed:
                return
            if self.writer.failure is not None:
                raise self.writer.failure
            forward.close(self._mode, self._batch_size)

    # ---- the draft's choices ----------------------------------------------------------------------------------

    def chosen(self, drafted: Any, parents: Any, read: Callable[[Array], Array] = lambda parents: parents) -> None:
        """What the draft goes on from in its next step.

        Args:
            drafted: tokens [T].
            parents: which branch each of them descends from [B, topk]; None at step 1, and for a chain.
            read: makes numbers of branches of `parents`, once they are known.
        """
        if len(self._admitted.ended) < len(self._requests):
            numbers = None if parents is None else self._stage.copy(parents)
            self._chosen = self._stage.copy(drafted), numbers, read

    def _choose(self, drafted: Held, numbers: Held | None, read: Callable[[Array], Array]) -> Callable[[], None]:
        """Tell the tracker of a choice, once it is known."""
        for held in (numbers, drafted):
            if held is not None:
                self._stage.add(held)

        def choose() -> None:
            parents = None if numbers is None else read(numbers.array)
            self._tracker.select_branches(parents, drafted.array.reshape(-1))

        return choose

    def verified(self, verified: Verified | None) -> None:
        """A verify round is over; None for one of no request."""
        if verified is None or not self.writer.accepting:
            return
        rids = {b: rid for b, rid in enumerate(verified.rids) if self._goes_on(rid)}
        if not rids:
            return
        with self._lock:
            if self._closed:
                return
            kept = self._keep_round(verified)
            arrays = cache(lambda: {name: held.array for name, held in kept.items()})
            self._stage.then(lambda: self._rounds(rids, arrays(), verified.count))
            if not self._stage.late:
                self._forwards.send()

    def _keep_round(self, verified: Verified) -> dict[str, Held]:
        keep = self._stage.keep
        kept = {name: keep(getattr(verified, name)) for name in ("tokens", "predicted", "accepted", "lengths")}
        # rank 0 writes the rounds down; the others only have to follow them
        if self._forwards.leads:
            kept["best"] = keep(verified.best(), fresh=True)
            if verified.tree is not None:
                kept["children"], kept["siblings"] = map(keep, verified.tree)
        return kept

    def _rounds(self, rids: Mapping[int, str], kept: Mapping[str, Array], count: int) -> Iterator[Part]:
        """Take note of a verify round of `count` tokens of each request, and write it down."""
        by_node = {
            name: array.reshape(-1, count) for name, array in kept.items() if name not in ("accepted", "lengths")
        }
        for b, rid in rids.items():
            tokens = by_node["tokens"][b]
            answer = by_node["predicted"][b, : kept["accepted"][b]].tolist()
            tree: dict[str, Any] = {}
            if "best" in by_node:
                parents = list(range(-1, count - 1))
                if "children" in by_node:
                    parents = tree_parents(by_node["children"][b], by_node["siblings"][b])
                tree = {
                    "proposed": tokens[1:].tolist(),
                    "parents": parents[1:],
                    "target_argmax": by_node["best"][b].tolist(),
                }
            yield from self._round(rid, int(kept["lengths"][b]) - 1, int(tokens[0]), answer, tree)

    def close_round(self, rid: str, root: int, fed: int, kept: Sequence[int], tree: Mapping[str, Any]) -> None:
        """A verify round of one request is over, all of which is known here and now.

        Args:
            rid: the request.
            root: root that the round drafted from.
            fed: the token at place root + 1, which the round started from.
            kept: tokens it committed behind that: accepted ones, and the target's own.
            tree: ``proposed``, ``parents`` and ``target_argmax`` of rounds.parquet.
        """
        written = tree if self._forwards.leads else {}
        self._note(lambda: self._round(rid, root, fed, kept, written))

    def commit(self, rid: str, place: int, tokens: Sequence[int]) -> None:
        """The target committed tokens of a request from `place` on, and there was no round."""

        def note() -> None:
            if rid in self._tracker:
                self._tracker.commit(rid, place, tokens)

        self._note(note)

    def _note(self, task: Callable[[], Iterable[Part] | None]) -> None:
        with self._lock:
            if not self._closed:
                self._stage.then(task)
                if not self._stage.late:
                    self._forwards.send()

    def _round(self, rid: str, root: int, fed: int, kept: Sequence[int], tree: Mapping[str, Any]) -> Iterator[Part]:
        """Take note of a round; rank 0, which knows its `tree`, writes it down, the others only follow."""
        if rid not in self._tracker:
            return
        record = {
            "prompt_id": self._tracker.prompt_id(rid),
            "round": self._tracker.close_round(rid, root, [fed, *kept]),
            "root": root,
            "accepted": list(kept[:-1]),
            "bonus": kept[-1] if kept else -1,
        }
        if tree:
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

    def _note_prompts(self, rids: list[str]) -> list[Part]:
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
