"""Bookkeeping of cache slots and token ids between draft, verify and draft extend, in plain torch.

``req_to_token`` is ``[requests, width]``: the cache slot of every token of every request. Positions from a
request's length on are slots already reserved for it; draft and verify tokens use them. ``pool_len``, the
width of that table, is an argument of the compiled kernels that torch does not need.
"""

# ruff: noqa: ARG001  # the signatures are those SGLang calls

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes the slots of positions ``start .. end`` of each request to ``out_cache_loc``, packed.

    Args:
        req_pool_indices, start_offset, end_offset: ``[B]`` integer.
        out_cache_loc: ``[>= sum(end - start)]`` integer, written.
    """
    row, column = _spans(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: row.numel()] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The inverse of :func:`assign_extend_cache_locs_cpu`: writes ``out_cache_loc`` into ``req_to_token``."""
    row, column = _spans(req_pool_indices, start_offset, end_offset)
    req_to_token[row, column] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Writes the ``topk * num_cols`` slots behind each request's last token to ``out_cache_loc``, packed."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1))


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A token table for the draft steps, one row for each of the ``topk`` branches of each request.

    Branch ``k`` sees the request's tokens and then the ``num_steps`` slots that belong to branch ``k``. Slots
    follow the branch *number*: after the best ``topk`` children were chosen over all parents, branch ``k``
    still reads the slot branch ``k`` wrote in the step before, whoever its parent is. GPU backends index the
    same way.

    Returns:
        ``[B * topk, pool_len]`` of the dtype of ``req_to_token``, zero behind the last slot in use.
    """
    lengths_B = seq_lens.long()
    rows_B = req_pool_indices.long()
    table = req_to_token.new_zeros(rows_B.numel(), topk, pool_len)
    committed = torch.arange(pool_len) < lengths_B[:, None]
    table.copy_(torch.where(committed, req_to_token[rows_B, :pool_len], 0)[:, None])
    steps = torch.arange(num_steps)
    source = lengths_B[:, None, None] + torch.arange(topk)[:, None] * num_steps + steps
    slots = req_to_token[rows_B[:, None, None], source]
    target = (lengths_B[:, None, None] + steps).expand_as(slots)
    return table.scatter_(2, target, slots).view(-1, pool_len)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Writes the last accepted token of each request to ``bonus_tokens``, ``[B]``.

    Args:
        accept_tokens: ``[B, accept_stride]`` or flat.
        accept_lens: ``[B]``, accepted drafts plus one.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Packs the slots of accepted tokens (``accept_index`` not -1) in ``accept_out_cache_loc``."""
    accepted = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shifts the ids of each request one to the left, in place, and puts its new token behind them.

    Args:
        input_ids: ``[T]`` integer.
        extend_start_loc, extend_seq_lens: ``[B]`` integer, the rows of each request.
        topk_index: ``[B]`` (or ``[B, 1]``) integer, the new tokens.
        select_index: ``[B]`` integer, flat places for the new tokens; the last row of each request if None.
    """
    starts_B, lengths_B = extend_start_loc.long(), extend_seq_lens.long()
    _, place = _spans(starts_B, starts_B, starts_B + (lengths_B - 1).clamp_min(0))
    input_ids[place] = input_ids[place + 1]
    last_B = starts_B + lengths_B - 1 if select_index is None else select_index.long()
    filled = lengths_B > 0
    new_tokens_B = topk_index.reshape(-1)[: lengths_B.numel()]
    input_ids[last_B[filled]] = new_tokens_B[filled].to(input_ids.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copies slots ``src_loc`` to ``tgt_loc`` in every buffer; sources are read before targets are written.

    Args:
        data_ptrs: ``[buffers]`` unsigned integer, addresses of contiguous buffers in this process.
        strides: ``[buffers]`` integer, bytes a slot.
        tgt_loc, src_loc: ``[n]`` integer.
    """
    if tgt_loc.numel() == 0:
        return
    targets, sources = tgt_loc.long(), src_loc.long()
    slots = int(torch.maximum(targets.max(), sources.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        rows[targets] = rows[sources]


def _spans(rows_B: Tensor, start_B: Tensor, end_B: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every element of the spans ``start .. end``, in order; ``[sum(end - start)]``."""
    lengths_B = end_B.long() - start_B.long()
    first_B = start_B.long() - (torch.cumsum(lengths_B, 0) - lengths_B)
    columns = torch.arange(int(lengths_B.sum())) + torch.repeat_interleave(first_B, lengths_B)
    return torch.repeat_interleave(rows_B.long(), lengths_B), columns
