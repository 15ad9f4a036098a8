"""Which tensor-parallel rank this process is, and what part of each module it holds.

The modules are asked, not the command line: under data-parallel attention the draft runs in a smaller group than the
target.
"""

from __future__ import annotations

from typing import Any

from eagle_trace.capture import Shard
from eagle_trace_sglang.layers import draft_layers


def place(linear: Any) -> tuple[int, int]:
    """Rank of this process in the group that a parallel linear is split over, and the group's size."""
    return _in_group(linear.tp_group) if hasattr(linear, "tp_group") else (linear.tp_rank, linear.tp_size)


def _in_group(group: Any) -> tuple[int, int]:
    # None is how SGLang says that a layer is not split
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def key_value_heads(qkv_proj: Any) -> Shard:
    """Which part of the key/value heads this rank holds; ranks share a head where there are more ranks than heads."""
    rank, size = _in_group(qkv_proj.kv_tp_group) if hasattr(qkv_proj, "kv_tp_group") else place(qkv_proj)
    replicas = int(qkv_proj.num_kv_head_replicas)
    return Shard(rank // replicas, size // replicas)


def vocabulary_rows(embedding: Any) -> Shard:
    """Which part of its rows this rank holds of an embedding or head; the parts are equal only with their padding."""
    if int(embedding.tp_size) == 1:
        return Shard(0, 1)
    rows = embedding.shard_indices
    size = rows.padded_org_vocab_end_index - rows.padded_org_vocab_start_index
    return Shard(rows.padded_org_vocab_start_index // size, int(embedding.tp_size))


def draft_place(model: Any) -> tuple[int, int]:
    """Rank of this process among those that run the draft together, and how many they are."""
    attention = getattr(draft_layers(model)[0][1], "self_attn", None)
    linear = getattr(attention, "qkv_proj", None)
    return (0, 1) if linear is None else place(linear)


def replicas(server_args: Any) -> int:
    """How many groups of ranks of this SGLang answer requests of their own (data parallelism, also of attention)."""
    return int(server_args.dp_size) * int(getattr(server_args, "attn_dp_size", 1))
