"""Stands in for the ``sgl_kernel`` wheel, which is built for CUDA and cannot be imported without it.

It is found first only in processes started with :func:`sglang_cpu_eagle.cpu_environment`. The EAGLE-3
path on a CPU calls the kernels below. SGLang imports many more names than it calls: those exist, and raise
when called.
"""

from __future__ import annotations

from typing import NoReturn

from sglang_cpu_eagle.kernels import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    decode_attention_cpu,
    extend_attention_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    register_operators,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

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
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

#: How :func:`sglang_cpu_eagle.install` tells this module from the wheel.
IS_EAGLE_TRACE_SHIM = True

register_operators()


class _Missing:
    """A kernel by name only."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"SGLang called sgl_kernel.{self.__name__}, which eagle-trace does not provide on a CPU: its "
            "kernels serve unquantised decoder-only models with EAGLE-3"
        )


def __getattr__(name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
