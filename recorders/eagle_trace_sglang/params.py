"""Parameters of the draft as SGLang really holds them, under speculators' names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.recorder import parameter_row, to_array

#: names older releases and checkpoints use, and their present ones
LEGACY_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def canonical_name(name: str) -> str:
    """Speculators' name of a tensor in a checkpoint or in SGLang's module tree."""
    name = name.removeprefix("model.")
    for old, new in LEGACY_NAMES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def used_name(name: str) -> str | None:
    """The trained parameter that one of the model's is used as, both by canonical name; None if it is never used.

    A layer behind the first starts with `input_layernorm` in speculators. SGLang has it too, but applies `hidden_norm`.
    """
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.(input_layernorm|hidden_norm)\.weight", name)
    if later is None:
        return name
    return f"{later.group(1)}.input_layernorm.weight" if later.group(2) == "hidden_norm" else None


def checkpoint_names(draft: Path) -> dict[str, str]:
    """Tensor names stored in a checkpoint folder, by canonical name."""
    from safetensors import safe_open

    names: dict[str, str] = {}
    for file in sorted(draft.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            names |= {canonical_name(name): name for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    return names


def _split(name: str, tensor: Any, attention: Any) -> Iterator[tuple[str, Any]]:
    """A fused parameter as its parts, any other as itself."""
    if ".qkv_proj." in name:
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)
        start = 0
        for part, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            yield name.replace("qkv_proj", part), tensor[start : start + size]
            start += size
    elif ".gate_up_proj." in name:
        half = tensor.shape[0] // 2
        yield name.replace("gate_up_proj", "gate_proj"), tensor[:half]
        yield name.replace("gate_up_proj", "up_proj"), tensor[half:]
    else:
        yield name, tensor


def loaded_params(model: Any, hot_token_id: Any, stored: Set[str]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded `LlamaForCausalLMEagle3`.

    Args:
        model: the draft model.
        hot_token_id: the worker's draft-to-target map [draft vocabulary] as ids, or None; recorded as offsets (`d2t`).
        stored: canonical names of the tensors in the checkpoint.
    """
    rows = {
        "lm_head.weight": model.config.draft_vocab_size,
        "model.embed_tokens.weight": model.config.vocab_size,
    }
    for host_name, parameter in model.named_parameters():
        # SGLang pads vocabularies to a multiple of 64; the padding is nobody's parameter
        parameter = parameter[: rows.get(host_name)]
        attention = None
        if ".qkv_proj." in host_name:
            attention = model.get_submodule(host_name.partition(".qkv_proj.")[0])
        for name, part in _split(host_name, parameter, attention):
            canonical = canonical_name(name)
            if (trained := used_name(canonical)) is not None:
                yield parameter_row(host_name, trained, part, in_checkpoint=canonical in stored)
    if hot_token_id is not None:
        ids = to_array(hot_token_id)
        yield parameter_row("hot_token_id", "d2t", ids - np.arange(len(ids)), in_checkpoint="d2t" in stored)
