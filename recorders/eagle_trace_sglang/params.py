"""Parameters of the draft as SGLang really holds them, under speculators' names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.capture import Shard
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row
from eagle_trace_sglang.ranks import key_value_heads, place, vocabulary_rows

#: what torch also saves beside a model, and SGLang leaves
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


def used_name(name: str) -> str | None:
    """The trained parameter that one of the model's is used as, both by canonical name; None if it is never used.

    A layer behind the first starts with `input_layernorm` in speculators. SGLang has it too, but applies `hidden_norm`.
    """
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.(input_layernorm|hidden_norm)\.weight", name)
    if later is None:
        return name
    return f"{later.group(1)}.input_layernorm.weight" if later.group(2) == "hidden_norm" else None


def checkpoint_names(draft: Path) -> dict[str, str]:
    """Tensor names stored in a checkpoint folder, by canonical name; in the files of the kind SGLang reads."""
    for pattern, read in (("*.safetensors", _safetensors_names), ("*.bin", _torch_names), ("*.pt", _torch_names)):
        files = sorted(draft.glob(pattern))
        if files:
            found = [name for file in files if not file.name.endswith(NOT_WEIGHTS) for name in read(file)]
            return {canonical_name(name): name for name in found}
    return {}


def _safetensors_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


def _torch_names(file: Path) -> list[str]:
    import torch

    # the server has read these files so already; on the meta device no number is read again
    return [str(name) for name in torch.load(file, map_location="meta", weights_only=True)]


@dataclass(frozen=True)
class _Held:
    """What this rank holds of one parameter: a part along `axis`, or all of it if `shard` is one of one."""

    name: str
    tensor: Any
    shard: Shard
    axis: int = 0


def _held(name: str, tensor: Any, owner: Any, attention: Any) -> Iterator[_Held]:
    """A fused parameter as its parts, any other as itself."""
    if ".qkv_proj." in name:
        query, heads = Shard(*place(owner)), key_value_heads(owner)
        start = 0
        for part, shard in zip(("q_proj", "k_proj", "v_proj"), (query, heads, heads), strict=True):
            size = attention.q_size if part == "q_proj" else attention.kv_size
            yield _Held(name.replace("qkv_proj", part), tensor[start : start + size], shard)
            start += size
    elif ".gate_up_proj." in name:
        shard = Shard(*place(owner))
        half = tensor.shape[0] // 2
        yield _Held(name.replace("gate_up_proj", "gate_proj"), tensor[:half], shard)
        yield _Held(name.replace("gate_up_proj", "up_proj"), tensor[half:], shard)
    elif hasattr(owner, "shard_indices"):
        # SGLang pads vocabularies to a multiple of 64; the padding is nobody's parameter. So the last ranks hold less
        rows = owner.shard_indices
        count = rows.org_vocab_end_index - rows.org_vocab_start_index
        yield _Held(name, tensor[:count], vocabulary_rows(owner))
    elif hasattr(owner, "reduce_results") and tensor.ndim == 2:
        # split along its inputs; its bias is not
        yield _Held(name, tensor, Shard(*place(owner)), axis=1)
    else:
        yield _Held(name, tensor, Shard(0, 1))


def loaded_params(model: Any, hot_token_id: Any, stored: Set[str]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded `LlamaForCausalLMEagle3`: what this tensor-parallel rank holds of each.

    Args:
        model: the draft model.
        hot_token_id: the worker's draft-to-target map [draft vocabulary] as ids, or None; recorded as offsets (`d2t`).
        stored: canonical names of the parameters that the checkpoint's tensors fill (`names.fills`).
    """
    for host_name, parameter in model.named_parameters():
        owner = model.get_submodule(host_name.rpartition(".")[0])
        attention = None
        if ".qkv_proj." in host_name:
            attention = model.get_submodule(host_name.partition(".qkv_proj.")[0])
        for held in _held(host_name, parameter, owner, attention):
            canonical = canonical_name(held.name)
            if (trained := used_name(canonical)) is None:
                continue
            yield parameter_row(
                host_name,
                trained,
                held.tensor,
                in_checkpoint=canonical in stored,
                shard=held.shard if held.shard.count > 1 else None,
                shard_axis=held.axis,
            )
    if hot_token_id is not None:
        ids = to_array(hot_token_id)
        yield parameter_row("hot_token_id", "d2t", ids - np.arange(len(ids)), in_checkpoint="d2t" in stored)
