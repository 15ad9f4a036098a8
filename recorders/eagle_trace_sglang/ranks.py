"""Which tensor-parallel rank this process is, and what part of each module it holds.

The modules are asked, not the command line: under data-parallel attention the draft runs in a smaller group than the
target.
"""

from __future__ import annotations

from typing import Any

from eagle_trace_serving.parallel import place
from eagle_trace_sglang.layers import draft_layers


def draft_place(model: Any) -> tuple[int, int]:
    """Rank of this process among those that run the draft together, and how many they are."""
    attention = getattr(draft_layers(model)[0][1], "self_attn", None)
    # latent attention splits its heads at `q_b_proj`
    linear = getattr(attention, "qkv_proj", None) or getattr(attention, "q_b_proj", None)
    return (0, 1) if linear is None else place(linear)


def replicas(server_args: Any) -> int:
    """How many groups of ranks of this SGLang answer requests of their own (data parallelism, also of attention)."""
    return int(server_args.dp_size) * int(getattr(server_args, "attn_dp_size", 1))
