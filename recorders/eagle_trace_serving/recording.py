"""One recording inside SGLang's scheduler process: from the requests it takes to the rows it hands to the writer.

A whole forward is handed over at once, so that a recording that ends between two sites of a call keeps none of that
call. The scheduler's thread runs everything here but `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from eagle_trace.capture import Array
from eagle_trace.prompts import prompts_digest
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.forward import Forward, Forwards
from eagle_trace.recording.stage import Held, Stage
from eagle_trace.streams import Part
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.admission import Admitted
from eagle_trace_serving.draft_rows import DraftCall, Index, RowTracker, tree_parents
from eagle_trace_serving.orders import Order
from eagle_trace_sglang.sites import taps

#: forward modes of the draft whose rows are data; an idle or prebuilt batch computes nothing of a request
RECORDED_MODES = ("EXTEND", "MIXED", "DECODE", "DRAFT_EXTEND_V2")


class Recording:
    """Takes requests, captures the draft's forwards of them, writes the trace.

    Args:
        order: what to record.
        writer: takes the rows.
        model: the draft; says which part of a site this rank computes.
        target_width: width of one target layer's features.
        hot_token_id: the worker's draft-to-target map, or None.
    """

    def __init__(self, order: Order, writer: TraceWriter, model: Any, target_width: int, hot_token_id: Any) -> None:
        self.order = order
        self.writer = writer
        shards = {} if model is None else {tap.site: tap.shard for tap in taps(model)}
        target_ids = None if hot_token_id is None else to_array(hot_token_id)
        self._forwards = Forwards(writer, order.selection, target_width, target_ids, shards)
        self._stage = self._forwards.stage
        self._admitted = Admitted(order.admission)
        self._tracker = RowTracker()
        self._requests: dict[str, Any] = {}
        self._forward: Forward | None = None
        self._mode, self._batch_size = "", 0
        #: what the draft chose for its next step: parents of the branches, if it is a tree, and tokens
        self._chosen: tuple[Held | None, Held, int, int] | None = None
        # rows go out and the recording is closed from different threads
        self._lock = threading.Lock()
        self._closed = False

    # ---- requests ---------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request (SGLang's `Req`) was queued."""
        if self._admitted.take(request.rid, request.origin_input_ids):
            number = self._admitted.ids[request.rid]
            self._stage.then(lambda: self._tracker.admit(request.rid, number))
            self._requests[request.rid] = request
            # written again when it has ended: a server that is killed in between leaves its rows with their prompt.
            # Digest and text of a long prompt take time, so the writer's thread makes them
            self.writer.put_record("prompts", partial(self._new_prompt, request.rid, request))

    def ended(self, request: Any) -> None:
        """A request was answered or aborted."""
        if request.rid in self._requests and request.rid not in self._admitted.ended:
            self._admitted.ended.add(request.rid)
            self._stage.then(lambda: self._tracker.leave(request.rid))

    def _goes_on(self, rid: str) -> bool:
        """Whether a request is recorded and has not ended."""
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
        prompt = list(request.origin_input_ids)
        return {
            "prompt_id": self._admitted.ids[rid],
            "prompt_key": self._admitted.key(rid),
            "request_id": rid,
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt),
            "text": _text(request.tokenizer, prompt, []),
            "output_ids": [],
            "cached_tokens": 0,
            "finish_reason": None,
        }

    def _prompt(self, rid: str, request: Any) -> dict[str, Any]:
        prompt = list(request.origin_input_ids)
        answer = list(request.output_ids_through_stop)
        reason = request.finished_reason.to_json()["type"] if request.finished_reason is not None else None
        return self._new_prompt(rid, request) | {
            "token_ids": self._tracker.committed(rid, prompt, answer),
            "text": _text(request.tokenizer, prompt, answer),
            "output_ids": answer,
            "cached_tokens": self._tracker.first_root(rid),
            "finish_reason": reason,
        }

    # ---- one forward of the draft -----------------------------------------------------------------------------

    def open_call(self, batch: Any) -> None:
        """The draft is about to run `batch` (SGLang's `ForwardBatch`)."""
        self._forward = None
        mode, rids = batch.forward_mode.name, list(batch.rids or ())
        if mode not in RECORDED_MODES or not self.writer.accepting or not any(map(self._goes_on, rids)):
            return
        self._open(batch, mode, rids)
        if self._forward is not None and mode != "DECODE":
            self._forward.take_features(batch.spec_info.hidden_states)

    def _open(self, batch: Any, mode: str, rids: list[str], picked: Callable[[], Index] | None = None) -> None:
        call, tokens = self._forwards.calls, len(batch.input_ids)
        facts = _call_facts(batch, mode, rids, self._stage)
        if mode == "DECODE" and self._chosen is not None:
            self._stage.then(self._choose(*self._chosen))
            self._chosen = None

        def last_rows() -> Index:
            known = facts()
            return known.last_rows if known.extend_lens is not None else np.arange(len(rids), dtype=np.intp)

        candidates = _rows_of(batch, mode, rids, self._goes_on, tokens) if self._stage.late else None
        self._forward = self._forwards.open(
            tokens, lambda: self._tracker.rows(facts(), call), candidates=candidates, picked=picked or last_rows
        )
        self._mode, self._batch_size = mode, len(rids)

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site of the open call; `tensor` is the host's own and is copied at once."""
        if self._forward is not None:
            self._forward.take(site, tensor)

    def replayed(self, batch: Any, select_index: Any, logits: Any, carry: Any) -> None:
        """A CUDA graph was replayed for `batch`: its outputs are those of the rows at `select_index` [B] only."""
        self.open_call(batch)
        if self._forward is not None:
            index = self._stage.keep(select_index)
            self._forward.picked = lambda: index.array.astype(np.intp)
            self.capture("carry", carry)
            self.capture("logits", logits)
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

    def chosen(self, drafted: Any, tree: Any, step: int, topk: int) -> None:
        """`drafted` and its `tree` info are what SGLang's `select_top_k_tokens` chose at `step`."""
        if len(self._admitted.ended) < len(self._requests):
            numbers = self._stage.copy(tree[2]) if topk > 1 and step > 0 else None
            self._chosen = numbers, self._stage.copy(drafted), step, topk

    def _choose(self, numbers: Held | None, drafted: Held, step: int, topk: int) -> Callable[[], None]:
        """Tell the tracker of a choice, once it is known."""
        for held in (numbers, drafted):
            if held is not None:
                self._stage.add(held)

        def choose() -> None:
            # the third part of the tree info numbers every candidate over all steps: undo that to get its parent
            parents = None if numbers is None else (numbers.array - topk * topk * (step - 1) - topk) // topk
            self._tracker.select_branches(parents, drafted.array.reshape(-1))

        return choose

    def verified(self, result: Any, batch: Any) -> None:
        """A verify round is over: `result` of the worker's `verify`, whose input `batch.spec_info` still is."""
        if batch.forward_mode.is_idle() or not self.writer.accepting:
            return
        rids = {b: request.rid for b, request in enumerate(batch.reqs) if self._goes_on(request.rid)}
        if not rids:
            return
        with self._lock:
            if self._closed:
                return
            kept = self._keep_round(result, batch)
            count = int(batch.spec_info.draft_token_num)
            self._stage.then(lambda: self._rounds(rids, {name: held.array for name, held in kept.items()}, count))
            if not self._stage.late:
                self._forwards.send()

    def _keep_round(self, result: Any, batch: Any) -> dict[str, Held]:
        verify, keep = batch.spec_info, self._stage.keep
        kept = {
            "tokens": keep(verify.draft_token),
            "predicted": keep(result.next_token_ids),
            "accepted": keep(result.accept_lens),
            "lengths": keep(batch.seq_lens),
        }
        # rank 0 writes the rounds down; the others only have to follow them
        if self._forwards.leads:
            kept["best"] = keep(result.logits_output.next_token_logits.argmax(dim=-1), fresh=True)
            kept["children"] = keep(verify.retrieve_next_token)
            kept["siblings"] = keep(verify.retrieve_next_sibling)
        return kept

    def _rounds(self, rids: Mapping[int, str], kept: Mapping[str, Array], count: int) -> Iterator[Part]:
        """Take note of a verify round of `count` tokens of each request, and write it down."""
        by_node = {
            name: kept[name].reshape(-1, count)
            for name in ("tokens", "predicted", "best", "children", "siblings")
            if name in kept
        }
        for b, rid in rids.items():
            if rid not in self._tracker:
                continue
            root, tokens = int(kept["lengths"][b]) - 1, by_node["tokens"][b]
            answer = by_node["predicted"][b, : kept["accepted"][b]].tolist()
            record = {
                "prompt_id": self._tracker.prompt_id(rid),
                "round": self._tracker.close_round(rid, root, [int(tokens[0]), *answer]),
                "root": root,
                "accepted": answer[:-1],
                "bonus": answer[-1] if answer else -1,
            }
            if "best" in by_node:
                tree = {
                    "proposed": tokens[1:].tolist(),
                    "parents": tree_parents(by_node["children"][b], by_node["siblings"][b])[1:],
                    "target_argmax": by_node["best"][b].tolist(),
                }
                yield "record", ("rounds", record | tree)

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


def _call_facts(batch: Any, mode: str, rids: list[str], stage: Stage) -> Callable[[], DraftCall]:
    """What a forward is given, once it is known."""
    accepted = getattr(batch.spec_info, "num_accept_tokens", None)
    kept = {name: stage.keep(getattr(batch, name)) for name in ("input_ids", "positions", "seq_lens")}
    if batch.extend_seq_lens is not None and mode != "DECODE":
        kept["extend_lens"] = stage.keep(batch.extend_seq_lens)
    if mode == "DRAFT_EXTEND_V2":
        kept["accept_lens"] = stage.keep(accepted)
    return cache(lambda: DraftCall(mode, rids, **{name: held.array for name, held in kept.items()}))


def _rows_of(batch: Any, mode: str, rids: list[str], wanted: Callable[[str], bool], tokens: int) -> Index | None:
    """Rows of the requests that are recorded, by what SGLang knows without asking its device; None for all."""
    lengths = getattr(batch, "extend_seq_lens_cpu", None)
    if mode in ("DECODE", "DRAFT_EXTEND_V2"):
        lengths = [tokens // max(1, len(rids))] * len(rids)
    if lengths is None or len(lengths) != len(rids) or sum(lengths) != tokens:
        return None
    return np.flatnonzero(np.repeat([wanted(rid) for rid in rids], lengths))
