"""What SGLang's scheduler tells a recording: its requests, forward batches and verify rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_trace.recording.arrays import to_array
from eagle_trace_serving.draft_rows import DraftCall, tree_parents
from eagle_trace_serving.recording import Exchange, Recording

#: forward modes of the draft whose rows are data; an idle or prebuilt batch computes nothing of a request
RECORDED_MODES = ("EXTEND", "MIXED", "DECODE", "DRAFT_EXTEND_V2")


class SGLangRecording(Recording):
    """A recording of SGLang's draft worker."""

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
        facts = _call_facts(batch)
        self._begin_call(
            facts, facts.last_rows if facts.extend_lens is not None else np.arange(len(facts.rids), dtype=np.intp)
        )
        if facts.mode != "DECODE":
            self._capture_fused(batch.spec_info.hidden_states)

    def replayed(self, batch: Any, select_index: Any, logits: Any, carry: Any) -> None:
        """A CUDA graph was replayed for `batch`: its outputs are those of the rows at `select_index` [B] only."""
        self.open_call(batch)
        if self._call is not None:
            self._call.picked = to_array(select_index).astype(np.intp)
            self.capture("carry", carry)
            self.capture("logits", logits)
            self.close_call()

    # ---- the draft's choices ----------------------------------------------------------------------------------

    def chosen(self, drafted: Any, tree: Any, step: int, topk: int) -> None:
        """`drafted` and its `tree` info are what SGLang's `select_top_k_tokens` chose at `step`."""
        parents = None
        if topk > 1 and step > 0:
            # the third part of the tree info numbers every candidate over all steps: undo that to get its parent
            parents = (to_array(tree[2]) - topk * topk * (step - 1) - topk) // topk
        self._tracker.select_branches(parents, to_array(drafted).reshape(-1))

    def verified(self, result: Any, batch: Any) -> None:
        """A verify round is over: `result` of the worker's `verify`, whose input `batch.spec_info` still is."""
        requests = [(b, request.rid) for b, request in enumerate(batch.reqs) if request.rid in self._tracker]
        if batch.forward_mode.is_idle() or not self.writer.accepting or not requests:
            return
        verify = batch.spec_info
        count = int(verify.draft_token_num)
        tokens = to_array(verify.draft_token).reshape(-1, count)
        predicted = to_array(result.next_token_ids).reshape(-1, count)
        accepted = to_array(result.accept_lens)
        lengths = to_array(batch.seq_lens)
        trees = {} if self.writer.manifest.tp_rank else self._trees(result, verify, tokens)
        for b, rid in requests:
            kept = predicted[b, : accepted[b]].tolist()
            self._close_round(rid, int(lengths[b]) - 1, int(tokens[b, 0]), kept, trees.get(b, {}))

    def _trees(self, result: Any, verify: Any, tokens: Any) -> dict[int, dict[str, Any]]:
        """What was proposed to each request of a batch, and what the target would choose behind each token."""
        best = to_array(result.logits_output.next_token_logits.argmax(dim=-1)).reshape(tokens.shape)
        children = to_array(verify.retrieve_next_token).reshape(tokens.shape)
        siblings = to_array(verify.retrieve_next_sibling).reshape(tokens.shape)
        return {
            b: {
                "proposed": tokens[b, 1:].tolist(),
                "parents": tree_parents(children[b], siblings[b])[1:],
                "target_argmax": best[b].tolist(),
            }
            for b in range(len(tokens))
        }


def _call_facts(batch: Any) -> DraftCall:
    mode = batch.forward_mode.name
    accepted = getattr(batch.spec_info, "num_accept_tokens", None)
    return DraftCall(
        mode=mode,
        rids=list(batch.rids),
        input_ids=to_array(batch.input_ids),
        positions=to_array(batch.positions),
        seq_lens=to_array(batch.seq_lens),
        extend_lens=None if batch.extend_seq_lens is None or mode == "DECODE" else to_array(batch.extend_seq_lens),
        accept_lens=to_array(accepted) if mode == "DRAFT_EXTEND_V2" else None,
    )
