"""SGLang's requests, forwards and verify rounds, as a recording takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle_trace.capture import Array
from eagle_trace_serving.batches import Batch, Verified

#: forward modes of the draft whose rows are data; an idle or prebuilt batch computes nothing of a request
RECORDED_MODES = ("EXTEND", "MIXED", "DECODE", "DRAFT_EXTEND_V2")
#: request ids of SGLang's own probes; they are no request of anybody
PROBES = ("HEALTH_CHECK",)


class SGLangRequest:
    """A `Req` of SGLang's scheduler."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.rid: str = request.rid

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of its prompt."""
        ids: Sequence[int] = self._request.origin_input_ids
        return ids

    @property
    def answer_ids(self) -> Sequence[int]:
        """Tokens of its answer so far."""
        ids: Sequence[int] = self._request.output_ids_through_stop
        return ids

    @property
    def finish_reason(self) -> str | None:
        """Why its answer ended; None as long as it goes on."""
        reason = self._request.finished_reason
        return None if reason is None else str(reason.to_json()["type"])

    @property
    def has_media(self) -> bool:
        """Whether its prompt has an image, a video or sound."""
        return getattr(self._request, "multimodal_inputs", None) is not None

    def text(self, prompt_ids: list[int], answer_ids: list[int]) -> str:
        """Both as text; nothing where the server runs without a tokenizer."""
        tokenizer = self._request.tokenizer
        if tokenizer is None:
            return ""
        return str(tokenizer.decode(prompt_ids)) + str(tokenizer.decode(answer_ids, skip_special_tokens=True))


def is_probe(request: Any) -> bool:
    """Whether a `Req` is one of SGLang's own."""
    return isinstance(request.rid, str) and request.rid.startswith(PROBES)


def batch_of(batch: Any) -> Batch | None:
    """What the draft is about to run, of a `ForwardBatch`; None if nothing of a request is computed."""
    mode, rids, rows = batch.forward_mode.name, list(batch.rids or ()), len(batch.input_ids)
    if mode not in RECORDED_MODES:
        return None
    step, verified = mode == "DECODE", mode == "DRAFT_EXTEND_V2"
    equal = [rows // max(1, len(rids))] * len(rids)
    return Batch(
        kind="step" if step else "extend",
        mode=mode,
        rids=rids,
        rows=rows,
        tensors={
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "seq_lens": batch.seq_lens,
            "extend_lens": None if step else batch.extend_seq_lens,
            "accept_lens": getattr(batch.spec_info, "num_accept_tokens", None) if verified else None,
        },
        features=None if step else batch.spec_info.hidden_states,
        lengths=equal if step or verified else getattr(batch, "extend_seq_lens_cpu", None),
    )


def verified_of(result: Any, batch: Any) -> Verified | None:
    """A verify round: `result` of the worker's `verify`, whose input `batch.spec_info` still is."""
    if batch.forward_mode.is_idle():
        return None
    verify = batch.spec_info
    return Verified(
        rids=[request.rid for request in batch.reqs],
        count=int(verify.draft_token_num),
        tokens=verify.draft_token,
        predicted=result.next_token_ids,
        accepted=result.accept_lens,
        lengths=batch.seq_lens,
        best=lambda: result.logits_output.next_token_logits.argmax(dim=-1),
        tree=(verify.retrieve_next_token, verify.retrieve_next_sibling),
    )


def parents_of(tree: Any, step: int, topk: int) -> tuple[Any, Callable[[Array], Array]]:
    """Which branch each row of the next step descends from, by the tree info of SGLang's `select_top_k_tokens`.

    Returns:
        Its numbers of candidates [B, topk], None at step 0 and in a chain; and what makes branches of them.
    """
    # the third part numbers every candidate over all steps: undo that to get its parent
    first = topk * topk * (step - 1) + topk
    numbers = tree[2] if topk > 1 and step > 0 else None
    return numbers, lambda numbers: (numbers - first) // topk
