"""What a tensor-parallel rank holds of a draft, as the servers tell that have vLLM's parallel layers in common.

The modules are asked, not the command line: under data-parallel attention a draft runs in a smaller group than its
target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle_trace.capture import Shard
from eagle_trace.recording.names import FUSED_ON_LOAD
from eagle_trace.recording.tap import first, is_module


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


@dataclass(frozen=True)
class Held:
    """What this rank holds of one parameter: a part along `axis`, or all of it if `shard` is one of one."""

    name: str
    tensor: Any
    shard: Shard
    axis: int = 0


def parts_held(name: str, tensor: Any, owner: Any, attention: Any) -> Iterator[Held]:
    """A fused parameter as its parts, any other as itself."""
    if ".qkv_proj." in name:
        query, heads = Shard(*place(owner)), key_value_heads(owner)
        start = 0
        for part, shard in zip(("q_proj", "k_proj", "v_proj"), (query, heads, heads), strict=True):
            size = attention.q_size if part == "q_proj" else attention.kv_size
            yield Held(name.replace("qkv_proj", part), tensor[start : start + size], shard)
            start += size
    elif ".gate_up_proj." in name:
        shard = Shard(*place(owner))
        half = tensor.shape[0] // 2
        yield Held(name.replace("gate_up_proj", "gate_proj"), tensor[:half], shard)
        yield Held(name.replace("gate_up_proj", "up_proj"), tensor[half:], shard)
    elif ".fused_qkv_a_proj_with_mqa." in name:
        # held whole by every rank
        rank = attention.q_lora_rank
        for part, rows in zip(FUSED_ON_LOAD["fused_qkv_a_proj_with_mqa"], (tensor[:rank], tensor[rank:]), strict=True):
            yield Held(name.replace("fused_qkv_a_proj_with_mqa", part), rows, Shard(0, 1))
    elif hasattr(owner, "shard_indices"):
        # servers pad vocabularies to a multiple of 64; the padding is nobody's parameter. So the last ranks hold less
        rows = owner.shard_indices
        count = rows.org_vocab_end_index - rows.org_vocab_start_index
        yield Held(name, tensor[:count], vocabulary_rows(owner))
    elif hasattr(owner, "reduce_results") and tensor.ndim == 2:
        # split along its inputs; its bias is not
        yield Held(name, tensor, Shard(*place(owner)), axis=1)
    elif hasattr(owner, "gather_output"):
        # split along its outputs, and its bias with them
        yield Held(name, tensor, Shard(*place(owner)))
    else:
        yield Held(name, tensor, Shard(0, 1))


def halves(output: Any) -> tuple[Any, Any]:
    """The two parts of a fused output [T, 2 * W]."""
    both = first(output)
    middle = both.shape[-1] // 2
    return both[..., :middle], both[..., middle:]


def columns_held(linear: Any) -> Shard | None:
    """Which part of its outputs this rank computes of a linear that may be split; None if it gives all of them."""
    if not is_module(linear) or getattr(linear, "gather_output", True):
        return None
    shard = Shard(*place(linear))
    return shard if shard.count > 1 else None


def split_over_ranks(linear: Any) -> tuple[Shard | None, Shard | None]:
    """Which part of its outputs this rank computes of a parallel linear, and of its key/value heads if it has them."""
    if not is_module(linear):
        return None, None
    shards = Shard(*place(linear)), key_value_heads(linear) if hasattr(linear, "num_kv_head_replicas") else None
    whole, heads = (shard if shard is not None and shard.count > 1 else None for shard in shards)
    return whole, heads
