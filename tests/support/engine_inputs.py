"""Faults in what a running SGLang feeds its draft: positions, tokens, features, carries, key slots.

Each changes the forward batch on its way into the draft's model runner, as a server with that bug would have built it,
and nothing else: the scheduler's books, the target and the verification stay right. The recorder sees what the draft
sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "EAGLE_TRACE_TEST_FAULT"
SHIFT = 7
#: forward modes: a prefill, the extend after a verify round, a draft step
PREFILL, EXTEND, STEP = "EXTEND", "DRAFT_EXTEND_V2", "DECODE"


def current() -> str:
    """Name of the fault to commit now, empty for none."""
    return Path(os.environ[FILE]).read_text().strip()


def install(worker: Any) -> None:
    """Patch the draft's model runner of a loaded worker, and the worker's choice of a chunk's last token."""
    runner = worker.draft_runner
    forward, state = runner.forward, {}

    def faulty(batch: Any, *args: Any, **kwargs: Any) -> Any:
        change = CHANGES.get(current())
        if batch.forward_mode.name == STEP:
            state["step"] = state.get("step", 0) + 1
        else:
            state["step"] = 0
        if change is None or batch.forward_mode.is_idle():
            return forward(batch, *args, **kwargs)
        # the worker counts on with these tensors after the forward
        kept = batch.positions, batch.input_ids, batch.out_cache_loc
        change(batch, state)
        try:
            return forward(batch, *args, **kwargs)
        finally:
            batch.positions, batch.input_ids, batch.out_cache_loc = kept

    runner.forward = faulty
    _patch_tail_tokens()
    _patch_choice(worker)
    _patch_attention(runner, state)


# ---- positions -----------------------------------------------------------------------------------------------------


def _shifted(*modes: str) -> Callable[[Any, dict[str, Any]], None]:
    def change(batch: Any, _state: dict[str, Any]) -> None:
        if batch.forward_mode.name in modes:
            batch.positions = batch.positions + SHIFT

    return change


def _growing(batch: Any, state: dict[str, Any]) -> None:
    """Each draft step is one further off than the one before."""
    if batch.forward_mode.name == STEP:
        batch.positions = batch.positions + state["step"]


# ---- tokens --------------------------------------------------------------------------------------------------------


def _last_accepted(batch: Any) -> Any:
    """Index of the row of each request's bonus token in an extend after a verify round."""
    import torch

    accepted = batch.spec_info.num_accept_tokens
    width = len(batch.input_ids) // len(accepted)
    return torch.arange(len(accepted)) * width + accepted - 1


def _bonus_of_another(batch: Any, _state: dict[str, Any]) -> None:
    if batch.forward_mode.name == EXTEND:
        at = _last_accepted(batch)
        batch.input_ids = batch.input_ids.clone()
        batch.input_ids[at] = batch.input_ids[at.roll(1)]


def _bonus_before(batch: Any, _state: dict[str, Any]) -> None:
    """The row of the bonus token is fed the token before it, where the round accepted one."""
    if batch.forward_mode.name == EXTEND:
        at = _last_accepted(batch)[batch.spec_info.num_accept_tokens > 1]
        batch.input_ids = batch.input_ids.clone()
        batch.input_ids[at] = batch.input_ids[at - 1]


def _draft_before(batch: Any, state: dict[str, Any]) -> None:
    """Draft steps behind the first are fed the token of the step before once more."""
    if batch.forward_mode.name != STEP:
        return
    fed = batch.input_ids.clone()
    if state["step"] > 1:
        batch.input_ids = state["fed"]
    state["fed"] = fed


def _patch_tail_tokens() -> None:
    """`chunk-end`: the last row of a chunk is fed the token sampled there, not the prompt's next one."""
    from sglang.srt.speculative import eagle_worker_v2

    right = eagle_worker_v2._eagle_prefill_tail_tokens

    def faulty(batch: Any, next_token_ids: Any) -> Any:
        if current() != "chunk-end":
            return right(batch, next_token_ids)
        return next_token_ids.to(batch.input_ids.dtype)

    eagle_worker_v2._eagle_prefill_tail_tokens = faulty


def _patch_choice(worker: Any) -> None:
    """`draft-unmapped`: behind the first one, draft steps go on from draft ids that nobody mapped to target ids."""
    import torch
    from sglang.srt.speculative import eagle_worker_v2

    right, target_of = eagle_worker_v2.select_top_k_tokens, worker.hot_token_id

    def faulty(i: int, topk_p: Any, topk_index: Any, *args: Any) -> Any:
        if current() == "draft-unmapped" and i > 0:
            topk_index = torch.searchsorted(target_of, topk_index.contiguous())
        return right(i, topk_p, topk_index, *args)

    eagle_worker_v2.select_top_k_tokens = faulty


# ---- features and carries ------------------------------------------------------------------------------------------


def _features_of_another(batch: Any, _state: dict[str, Any]) -> None:
    if batch.forward_mode.name == EXTEND:
        hidden = batch.spec_info.hidden_states
        by_request = hidden.reshape(len(batch.rids), -1, hidden.shape[-1])
        batch.spec_info.hidden_states = by_request.roll(1, dims=0).reshape(hidden.shape)


def _features_late(batch: Any, state: dict[str, Any]) -> None:
    """Rows behind a verify round start from the feature before theirs; a prefill is right."""
    if batch.forward_mode.name == STEP:
        return
    last, hidden = state.setdefault("last", {}), batch.spec_info.hidden_states
    if batch.forward_mode.name == PREFILL:
        for rid, end in zip(batch.rids, batch.extend_seq_lens.cumsum(0).tolist(), strict=True):
            last[rid] = hidden[end - 1].clone()
        return
    late = hidden.reshape(len(batch.rids), -1, hidden.shape[-1]).roll(1, dims=1).clone()
    for b, (rid, count) in enumerate(zip(batch.rids, batch.spec_info.num_accept_tokens.tolist(), strict=True)):
        late[b, 0] = last[rid]
        last[rid] = hidden[b * late.shape[1] + count - 1].clone()
    batch.spec_info.hidden_states = late.reshape(hidden.shape)


def _carry_of_another(batch: Any, _state: dict[str, Any]) -> None:
    if batch.forward_mode.name == STEP:
        hidden = batch.spec_info.hidden_states
        by_request = hidden.reshape(len(batch.rids), -1, hidden.shape[-1])
        batch.spec_info.hidden_states = by_request.roll(1, dims=0).reshape(hidden.shape)


def _carry_stale(batch: Any, state: dict[str, Any]) -> None:
    """Draft steps behind the first start from what the first one started from."""
    if batch.forward_mode.name != STEP:
        return
    if state["step"] == 1:
        state["carry"] = batch.spec_info.hidden_states
    batch.spec_info.hidden_states = state["carry"]


# ---- key slots -----------------------------------------------------------------------------------------------------


def _slot_of_first(batch: Any, state: dict[str, Any]) -> None:
    """Draft steps behind the first write their keys where the first one did, and so leave their own slot as it was."""
    if batch.forward_mode.name != STEP:
        return
    if state["step"] == 1:
        state["slots"] = batch.out_cache_loc
    elif current() == "slot-of-first":
        batch.out_cache_loc = state["slots"]


def _patch_attention(runner: Any, state: dict[str, Any]) -> None:
    """`slot-shared`: the slots of the first two draft steps are one, so that the second overwrites the first's key."""
    attention = runner.model.model.layers[0].self_attn.attn
    forward = attention.forward

    def faulty(q: Any, k: Any, v: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if current() == "slot-shared" and batch.forward_mode.name == STEP and state["step"] == 2:
            pool, slots = runner.token_to_kv_pool, state["slots"]
            for held, new in ((pool.get_key_buffer, k), (pool.get_value_buffer, v)):
                buffer = held(attention.layer_id)
                buffer[slots] = new.reshape(-1, *buffer.shape[1:]).to(buffer.dtype)
        return forward(q, k, v, batch, *args, **kwargs)

    attention.forward = faulty


CHANGES: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "positions-prefill": _shifted(PREFILL),
    "positions-extend": _shifted(EXTEND),
    "positions-extends": _shifted(PREFILL, EXTEND),
    "positions-steps": _shifted(STEP),
    "positions-growing": _growing,
    "positions-everywhere": _shifted(PREFILL, EXTEND, STEP),
    "bonus-of-another": _bonus_of_another,
    "bonus-before": _bonus_before,
    "draft-before": _draft_before,
    "features-of-another": _features_of_another,
    "features-late": _features_late,
    "carry-of-another": _carry_of_another,
    "carry-stale": _carry_stale,
    "slot-of-first": _slot_of_first,
    "slot-shared": _slot_of_first,
}
