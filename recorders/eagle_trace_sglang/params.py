"""Parameters of the draft as SGLang really holds them, under speculators' names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row
from eagle_trace_serving.parallel import parts_held

#: fused parameters whose parts are as wide as their attention says
_SIZED_BY_ATTENTION = (".qkv_proj.", ".fused_qkv_a_proj_with_mqa.")


def used_name(name: str) -> str | None:
    """The trained parameter that one of the model's is used as, both by canonical name; None if it is never used.

    A layer behind the first starts with `input_layernorm` in speculators. SGLang has it too, but applies `hidden_norm`.
    """
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.(input_layernorm|hidden_norm)\.weight", name)
    if later is None:
        return name
    return f"{later.group(1)}.input_layernorm.weight" if later.group(2) == "hidden_norm" else None


def loaded_params(model: Any, hot_token_id: Any, stored: Set[str]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded draft: what this tensor-parallel rank holds of each.

    Args:
        model: the draft model.
        hot_token_id: the worker's draft-to-target map [draft vocabulary] as ids, or None; recorded as offsets (`d2t`).
        stored: canonical names of the parameters that the checkpoint's tensors fill (`names.fills`).
    """
    for host_name, parameter in model.named_parameters():
        owner = model.get_submodule(host_name.rpartition(".")[0])
        fused = next((one for one in _SIZED_BY_ATTENTION if one in host_name), None)
        attention = model.get_submodule(host_name.partition(fused)[0]) if fused else None
        for held in parts_held(host_name, parameter, owner, attention):
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
