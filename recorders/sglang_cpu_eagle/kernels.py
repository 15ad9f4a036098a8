"""Every kernel under the name SGLang calls it by, and its registration as a torch operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.library import Library

from sglang_cpu_eagle.attention import decode_attention_cpu, extend_attention_cpu
from sglang_cpu_eagle.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sglang_cpu_eagle.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "register_operators",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# The attention backend looks these two up in torch.ops.sgl_kernel; everything else it imports from the
# module.
_DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, "
    "Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal=True) -> ()"
)
#: before 0.5.20 SGLang's caches had no scales: there the operators are called without them
_SCALES = "float k_scale, float v_scale, "

#: names that modules of SGLang look up in torch.ops.sgl_kernel while they are imported. One that is absent costs the
#: whole module without a word ("Ignore import error"), and with `models/qwen3_5.py` the processors of every Qwen-VL
LOOKED_UP_ON_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu", "fused_gdn_gating_cpu", "fused_moe_router_cpu", "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)  # fmt: skip

_library: Library | None = None


def register_operators() -> None:
    """Registers the two attention kernels in ``torch.ops.sgl_kernel``; a second call changes nothing."""
    global _library
    if _library is not None:
        return
    # A fragment, so that a process holding another sgl_kernel library keeps it. Torch drops the operators
    # with the object.
    library = Library("sgl_kernel", "FRAGMENT")
    for schema, kernel in ((_DECODE, decode_attention_cpu), (_EXTEND, extend_attention_cpu)):
        name, arguments = schema.split("(", 1)
        before, after = arguments.split(_SCALES)
        library.define(schema)
        library.impl(name, kernel, "CPU")
        # an overload: torch takes the one that fits the arguments
        library.define(f"{name}.unscaled({before}{after}")
        library.impl(f"{name}.unscaled", _unscaled(kernel, before.count(",")), "CPU")
    _library = library
    for name in LOOKED_UP_ON_IMPORT:
        # a plain attribute of the namespace: found on import, refused if it is ever called
        setattr(torch.ops.sgl_kernel, name, partial(_refuse, name))


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise NotImplementedError(f"SGLang called sgl_kernel.{name}, which eagle-trace does not provide on a CPU")


def _unscaled(kernel: Callable[..., None], place: int) -> Callable[..., None]:
    """`kernel` called without its two scales, which come at `place`."""

    def call(*args: Any) -> None:
        kernel(*args[:place], 1.0, 1.0, *args[place:])

    return call
