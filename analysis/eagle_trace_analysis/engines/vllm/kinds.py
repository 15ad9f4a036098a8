"""How vLLM serves drafts of other kinds than EAGLE-3, by the ids of `checkpoint/kinds.py`.

Read from `vllm/config/speculative.py` (the methods) and `vllm/model_executor/models/registry.py` of 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.checkpoints import class_names

LATENT = "Eagle3DeepseekV2ForCausalLM"
METHODS = {
    "eagle1": "serve with the method eagle",
    "dflash": "serve with the method dflash",
    "dspark": "serve with the method dspark",
    "peagle": "serve with the method eagle3 and parallel_drafting",
    "mtp": "serve with the method mtp",
    "medusa": "serve with the method medusa",
    "mlp": "serve with the method mlp_speculator",
    "latent": f'serve with the method eagle3 and architectures ["{LATENT}"]',
    "whole": "as a draft of its own it is served with the method draft_model (it needs the target's tokenizer)",
}


def serves_kind(kind: str, config: Mapping[str, Any]) -> str:  # noqa: ARG001
    """What to do so that a draft of a kind is served; empty if the engine has no class for it."""
    return METHODS.get(kind, "")


def loads_kind(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether the config of an EAGLE-3 draft of another layer names the class that loads it."""
    return kind == "latent" and class_names(config)[:1] == [LATENT]
