"""What SGLang's scheduler tells a recording: its requests, forward batches and verify rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from eagle_trace.capture import Array
from eagle_trace.recording.stage import Held, Stage
from eagle_trace.streams import Part
from eagle_trace_serving.draft_rows import DraftCall, Index, tree_parents
from eagle_trace_serving.recording import Exchange, Recording

#: forward modes of the draft whose rows are data; an idle or prebuilt batch computes nothing of a request
RECORDED_MODES = ("EXTEND", "MIXED", "DECODE", "DRAFT_EXTEND_V2")


class SGLangRecording(Recording):
    """A recording of SGLang's draft worker."""

    #: what the draft chose for its next step, and how (`chosen`)
    _chosen: tuple[Held | None, Held, int, int] | None = None

    def arrived(self, request: Any) -> None:
        """A request (SGLang's `Req`) was queued."""
        media = getattr(request, "multimodal_inputs", None) is not None
        self._take(request.rid, request, request.origin_input_ids, media=media)

    def ended(self, request: Any) -> None:
        """A request was answered or aborted."""
        self._leave(request.rid)

    def exchange(self, request: Any) -> Exchange:
        """What is known of a request by now."""
        reason = request.finished_reason.to_json()["type"] if request.finished_reason is not None else None
        return Exchange(request.origin_input_ids, request.output_ids_through_stop, reason, request.tokenizer)

    # ---- one forward of the draft -----------------------------------------------------------------------------

    def open_call(self, batch: Any) -> None:
        """The draft is about to run `batch` (SGLang's `ForwardBatch`)."""
        self._call = None
        if batch.forward_mode.name not in RECORDED_MODES or not self._is_recorded(batch.rids or ()):
            return
        mode, rids, tokens = batch.forward_mode.name, list(batch.rids), len(batch.input_ids)
        facts = _call_facts(batch, self._stage)
        if mode == "DECODE" and self._chosen is not None:
            self._stage.then(self._choose(*self._chosen))
            self._chosen = None

        def last_rows() -> Index:
            known = facts()
            return known.last_rows if known.extend_lens is not None else np.arange(len(rids), dtype=np.intp)

        lengths = getattr(batch, "extend_seq_lens_cpu", None)
        if mode in ("DECODE", "DRAFT_EXTEND_V2"):
            lengths = [tokens // max(1, len(rids))] * len(rids)
        self._begin_call(mode, rids, tokens, facts, picked=last_rows, lengths=lengths)
        if mode != "DECODE" and self._call is not None:
            self._call.take_features(batch.spec_info.hidden_states)

    def replayed(self, batch: Any, select_index: Any, logits: Any, carry: Any) -> None:
        """A CUDA graph was replayed for `batch`: its outputs are those of the rows at `select_index` [B] only."""
        self.open_call(batch)
        if self._call is not None:
            chosen = self._stage.keep(select_index)
            self._call.picked = lambda: chosen.array.astype(np.intp)
            self.capture("carry", carry)
            self.capture("logits", logits)
            self.close_call()

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
        requests = [(b, request.rid) for b, request in enumerate(batch.reqs) if self._goes_on(request.rid)]
        if batch.forward_mode.is_idle() or not self.writer.accepting or not requests:
            return
        with self._lock:
            if self._closed:
                return
            kept = self._keep_round(result, batch)
            count = int(batch.spec_info.draft_token_num)
            self._note(lambda: self._rounds(requests, {name: held.array for name, held in kept.items()}, count))

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

    def _rounds(self, requests: list[tuple[int, str]], kept: dict[str, Array], count: int) -> Iterator[Part]:
        """A verify round, of `count` tokens of each request."""
        by_node = {name: kept[name].reshape(-1, count) for name in kept if name not in ("accepted", "lengths")}
        tokens = by_node["tokens"]
        for b, rid in requests:
            answer = by_node["predicted"][b, : kept["accepted"][b]].tolist()
            tree = {}
            if "best" in by_node:
                tree = {
                    "proposed": tokens[b, 1:].tolist(),
                    "parents": tree_parents(by_node["children"][b], by_node["siblings"][b])[1:],
                    "target_argmax": by_node["best"][b].tolist(),
                }
            yield from self._close_round(rid, int(kept["lengths"][b]) - 1, int(tokens[b, 0]), answer, tree)


def _call_facts(batch: Any, stage: Stage) -> Callable[[], DraftCall]:
    """What a forward is given, once it is known."""
    mode, rids = batch.forward_mode.name, list(batch.rids)
    kept = {name: stage.keep(getattr(batch, name)) for name in ("input_ids", "positions", "seq_lens")}
    if batch.extend_seq_lens is not None and mode != "DECODE":
        kept["extend_lens"] = stage.keep(batch.extend_seq_lens)
    if mode == "DRAFT_EXTEND_V2":
        kept["accept_lens"] = stage.keep(batch.spec_info.num_accept_tokens)
    return cache(lambda: DraftCall(mode, rids, **{name: held.array for name, held in kept.items()}))
