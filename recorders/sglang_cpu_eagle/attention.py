"""Attention over SGLang's paged key/value cache, in plain torch.

Legend for shape suffixes: ``B`` requests, ``E`` query rows a request, ``T`` query rows over all requests,
``L`` keys, ``H`` query heads, ``G`` key/value heads, ``D`` key width, ``V`` value width, ``S`` cache slots.

Whatever the dtype of the model, scores, softmax and the weighted sum are float32, as in the GPU kernels; only
the result is rounded back. Operations the EAGLE-3 path never needs raise :class:`NotImplementedError`.
"""

# ruff: noqa: ARG001  # the signatures are those SGLang calls

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

#: Upper bound on the elements of one score block (float32), so a long prefill stays at a few hundred MB.
MAX_SCORE_ELEMENTS = 1 << 25
#: Upper bound on the query rows of one product: in causal order, smaller blocks compute fewer scores in vain.
MAX_QUERY_ROWS = 256

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Rule:
    """What every score of one call is subject to."""

    scale: float
    logit_cap: float
    window: int
    sinks: Tensor | None
    is_causal: bool = True


@dataclass(frozen=True)
class _Cache:
    """The paged cache: keys ``[S, G, D]``, values ``[S, G, V]``, and the slot of every token of a request."""

    k: Tensor
    v: Tensor
    req_to_token: Tensor

    def read(self, pool_rows_B: Tensor, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of those tokens of those requests, ``[B, L, G, D]`` and ``[B, L, G, V]``."""
        slots_BL = self.req_to_token[pool_rows_B[:, None], positions_BL]
        flat = slots_BL.reshape(-1)
        # Several times faster than indexing with the slots.
        keys, values = self.k.index_select(0, flat), self.v.index_select(0, flat)
        return keys.view(*slots_BL.shape, *self.k.shape[1:]), values.view(*slots_BL.shape, *self.v.shape[1:])

    def read_start(self, pool_rows_B: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first ``lengths_B`` tokens of those requests, padded, and which of ``[B, L]`` are real."""
        positions_L = torch.arange(int(lengths_B.max()))
        # Padding repeats the last real token: a slot in no request's use may hold NaN, and 0 * NaN is NaN.
        padded_BL = torch.minimum(positions_L, (lengths_B[:, None] - 1).clamp_min(0))
        return *self.read(pool_rows_B, padded_BL), positions_L < lengths_B[:, None]


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One query row a request attends to all its cached tokens, the new one included; fills ``output``.

    Args:
        query: ``[B, H, D]``.
        k_cache, v_cache: ``[S, G, D]`` and ``[S, G, V]``; the new rows are written into them first.
        k_scale, v_scale: must be 1.
        output: ``[B, H, V]``, written.
        key, value: ``[B, G, D]`` and ``[B, G, V]`` (or the same flattened), or None when already in the
            cache.
        loc: ``[B]`` integer, the slots ``key`` and ``value`` go to.
        attn_logits: scratch space of the compiled kernel, not used.
        req_to_token: ``[requests, width]`` integer, slot of every token of a request.
        req_pool_indices, seq_lens: ``[B]`` integer; lengths count the new token.
        sm_scale: factor on the scores.
        logit_cap: scores become ``cap * tanh(score / cap)`` if positive.
        is_cross_attn, encoder_lens: must be False and None.
        sliding_window_size: tokens a query sees, itself included; no limit if not positive.
        sinks: ``[H]``, a score of an extra key without a value, or None.

    Raises:
        NotImplementedError: on cross attention, a quantised cache, or scales other than 1.
    """
    _reject_unsupported(k_cache, v_cache, k_scale, v_scale, is_cross_attn, encoder_lens)
    if key is not None and value is not None:
        k_cache[loc] = _as_rows(key, k_cache).to(k_cache.dtype)
        v_cache[loc] = _as_rows(value, v_cache).to(v_cache.dtype)
    rule = _Rule(sm_scale, logit_cap, sliding_window_size, sinks)
    cache = _Cache(k_cache, v_cache, req_to_token)
    lengths = seq_lens.tolist()
    for rows in _groups([1] * len(lengths), lengths):
        lengths_B = seq_lens[rows]
        keys_BLGD, values_BLGV, valid_BL = cache.read_start(req_pool_indices[rows], lengths_B)
        mask_BEL = valid_BL[:, None]
        if rule.window > 0:
            age_BL = (lengths_B - 1)[:, None] - torch.arange(valid_BL.shape[1])
            mask_BEL = mask_BEL & (age_BL < rule.window)[:, None]
        output[rows] = _attend(query[rows][:, None], keys_BLGD, values_BLGV, mask_BEL, rule)[:, 0].to(output.dtype)


def extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool = True,
) -> None:
    """New rows of each request attend to its cached prefix and to one another; fills ``o_extend``.

    Serves prefill (whole or in chunks), draft extend and target verify. Arguments not listed are those of
    :func:`decode_attention_cpu`.

    Args:
        q_extend, o_extend: ``[T, H, D]`` and ``[T, H, V]``.
        k_extend, v_extend: ``[T, G, D]`` and ``[T, G, V]`` (or the same flattened), the keys and values of
            the new rows; None means that they must be read from the cache. With a latent cache (MLA) and no
            prefix, SGLang gives them expanded, one for each query head, and has cached the latent itself.
        seq_lens: ``[B]``, cached prefix plus new rows.
        extend_seq_lens, extend_start_loc: ``[B]``, new rows of each request and where they start in
            ``q_extend``.
        max_len_extend: a sizing hint of the compiled kernel, not used.
        tree_mask: which new rows see which, flattened ``[E, E]`` blocks in request order (SGLang's QLEN_ONLY
            mode), instead of the causal order; the prefix is always visible. None means no tree.
        is_causal: False lets every new row see every other.

    Raises:
        NotImplementedError: on cross attention, a quantised cache, scales other than 1, a tree mask of
            another mode, a sliding window without causal order, or expanded keys behind a cached prefix.
    """
    _reject_unsupported(k_buffer, v_buffer, k_scale, v_scale, is_cross_attn, encoder_lens)
    rule = _Rule(sm_scale, logit_cap, sliding_window_size, sinks, is_causal)
    if rule.window > 0 and not is_causal:
        raise NotImplementedError("extend_attention_cpu has no sliding window for attention that is not causal")
    cache = _Cache(k_buffer, v_buffer, req_to_token)
    extends = extend_seq_lens.tolist()
    blocks = _tree_blocks(tree_mask, extends)
    for rows in _groups(extends, seq_lens.tolist()):
        extend = extends[rows[0]]
        if extend == 0:
            continue
        flat_BE = extend_start_loc[rows][:, None] + torch.arange(extend)
        prefix_B = seq_lens[rows] - extend
        if k_extend is None or v_extend is None:
            new = cache.read(req_pool_indices[rows], prefix_B[:, None] + torch.arange(extend))
        elif _is_expanded(q_extend, k_extend, k_buffer):
            if int(prefix_B.max()):
                raise NotImplementedError(
                    "the CPU attention of eagle-trace joins no expanded keys (MLA) to a cached prefix: "
                    "start SGLang with --disable-radix-cache"
                )
            new = _as_heads(k_extend, q_extend.shape[-1])[flat_BE], _as_heads(v_extend, o_extend.shape[-1])[flat_BE]
        else:
            new = _as_rows(k_extend, k_buffer)[flat_BE], _as_rows(v_extend, v_buffer)[flat_BE]
        old_k, old_v, valid_BP = cache.read_start(req_pool_indices[rows], prefix_B)
        # without a prefix nothing is joined: latents in the cache are of another shape than expanded rows
        joined = valid_BP.shape[1] > 0
        keys_BLGD = torch.cat([old_k, new[0]], dim=1) if joined else new[0]
        values_BLGV = torch.cat([old_v, new[1]], dim=1) if joined else new[1]
        tree_BEE = None if blocks is None else torch.stack([blocks[row] for row in rows])
        for start, stop in _query_blocks(len(rows) * q_extend.shape[1] * keys_BLGD.shape[1], extend):
            mask_BEL = _extend_mask(valid_BP, prefix_B, range(start, stop), extend, rule, tree_BEE)
            block_BE = flat_BE[:, start:stop]
            seen = mask_BEL.shape[-1]
            out = _attend(q_extend[block_BE], keys_BLGD[:, :seen], values_BLGV[:, :seen], mask_BEL, rule)
            o_extend[block_BE] = out.to(o_extend.dtype)


def _reject_unsupported(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    is_cross_attn: bool,
    encoder_lens: Tensor | None,
) -> None:
    if is_cross_attn or encoder_lens is not None:
        raise NotImplementedError("the CPU attention of eagle-trace serves decoder-only models: no cross attention")
    if k_cache.dtype not in _CACHE_DTYPES or v_cache.dtype not in _CACHE_DTYPES:
        raise NotImplementedError(
            "the CPU attention of eagle-trace reads float32, bfloat16 and float16 caches, "
            f"not {k_cache.dtype}: leave kv_cache_dtype at 'auto'"
        )
    if k_scale != 1.0 or v_scale != 1.0:
        raise NotImplementedError(
            f"the CPU attention of eagle-trace has no cache scales (k_scale {k_scale}, v_scale {v_scale})"
        )


def _as_rows(rows: Tensor, cache: Tensor) -> Tensor:
    """``[T, G * D]`` or ``[T, G, D]`` as ``[T, G, D]``."""
    return rows.reshape(-1, *cache.shape[1:])


def _is_expanded(query: Tensor, keys: Tensor, cache: Tensor) -> bool:
    """Whether new keys are those of every head, where the cache holds latents of another shape."""
    return query.shape[-1] != cache.shape[-1] or keys.numel() != len(keys) * math.prod(cache.shape[1:])


def _as_heads(rows: Tensor, width: int) -> Tensor:
    """``[T, H * width]`` or ``[T, H, width]`` as ``[T, H, width]``."""
    return rows.reshape(len(rows), -1, width)


def _groups(extends: list[int], lengths: list[int]) -> list[list[int]]:
    """Requests for one batched product: as many new rows each, and lengths close enough to pad."""
    groups: dict[tuple[int, bool], list[list[int]]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        # A request without a prefix has no token to pad one with.
        alike = groups.setdefault((extends[row], lengths[row] > extends[row]), [])
        # By falling length, so the first of a group is its longest: pad to it at most to about the double.
        if alike and lengths[alike[-1][0]] <= 2 * lengths[row] + 32:
            alike[-1].append(row)
        else:
            alike.append([row])
    return [sorted(group) for alike in groups.values() for group in alike]


def _tree_blocks(tree_mask: Tensor | None, extends: list[int]) -> list[Tensor] | None:
    """The ``[E, E]`` boolean block of each request, or None without a tree."""
    if tree_mask is None:
        return None
    sizes = [extend * extend for extend in extends]
    if tree_mask.numel() != sum(sizes) or tree_mask.dtype != torch.bool:
        raise NotImplementedError(
            "the CPU attention of eagle-trace takes boolean tree masks over the draft tokens only "
            f"(QLEN_ONLY, {sum(sizes)} elements here), not {tree_mask.numel()} of {tree_mask.dtype}"
        )
    flat = tree_mask.reshape(-1)
    ends = list(accumulate(sizes))
    return [flat[end - size : end].view(extend, extend) for end, size, extend in zip(ends, sizes, extends, strict=True)]


def _query_blocks(scores_a_row: int, extend: int) -> list[tuple[int, int]]:
    """Cuts the query rows into blocks within :data:`MAX_SCORE_ELEMENTS` and :data:`MAX_QUERY_ROWS`."""
    step = min(MAX_QUERY_ROWS, max(1, MAX_SCORE_ELEMENTS // max(1, scores_a_row)))
    return [(start, min(start + step, extend)) for start in range(0, extend, step)]


def _extend_mask(
    valid_BP: Tensor, prefix_B: Tensor, rows: range, extend: int, rule: _Rule, tree_BEE: Tensor | None
) -> Tensor:
    """``[B, rows, P + L]``: which prefix tokens and then which of the first L new ones the new ``rows`` see.

    L is ``extend``, but in causal order ends with the last row, since no row sees a key behind that.
    """
    last = rows.stop if rule.is_causal and tree_BEE is None else extend
    row_E = torch.arange(rows.start, rows.stop)
    age_EL = row_E[:, None] - torch.arange(last)
    if tree_BEE is not None:
        new_BEL = tree_BEE[:, rows.start : rows.stop]
    else:
        new_BEL = (age_EL >= 0 if rule.is_causal else torch.ones_like(age_EL, dtype=torch.bool))[None]
    old_BEP = valid_BP[:, None]
    if rule.window > 0:
        # By index, as the GPU kernels do, and not by depth in a tree.
        new_BEL = new_BEL & (age_EL < rule.window)
        age_BEP = (prefix_B[:, None] + row_E)[..., None] - torch.arange(valid_BP.shape[1])
        old_BEP = old_BEP & (age_BEP < rule.window)
    shape = (valid_BP.shape[0], len(rows), -1)
    return torch.cat([old_BEP.expand(shape), new_BEL.expand(shape)], dim=-1)


def _attend(q_BEHD: Tensor, keys_BLGD: Tensor, values_BLGV: Tensor, mask_BEL: Tensor, rule: _Rule) -> Tensor:
    """Softmax attention in float32 with grouped heads: ``[B, E, H, V]`` float32."""
    q = q_BEHD.transpose(1, 2).float()
    k = keys_BLGD.transpose(1, 2).float()
    v = values_BLGV.transpose(1, 2).float()
    mask = mask_BEL[:, None]
    if rule.logit_cap <= 0 and rule.sinks is None:
        grouped = q.shape[1] != k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = (q * rule.scale) @ k.transpose(-1, -2)
    if rule.logit_cap > 0:
        scores = rule.logit_cap * torch.tanh(scores / rule.logit_cap)
    scores = scores.masked_fill(~mask, -math.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v).transpose(1, 2)
