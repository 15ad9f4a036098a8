"""How SGLang serves drafts of other kinds than EAGLE-3, by the ids of `checkpoint/kinds.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.checkpoints import class_names
from eagle_trace_analysis.engines.sglang.engine import ARCHITECTURE

#: classes that load a block-diffusion draft
DFLASH = frozenset({"DFlashDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel", "DFlashLagunaForCausalLM"})
EAGLE1 = {"qwen2": "Qwen2ForCausalLMEagle", "mistral": "MistralForCausalLMEagle"}
LATENT = "Eagle3DeepseekV2ForCausalLM"


def serves_kind(kind: str, config: Mapping[str, Any]) -> str:
    """What to do so that a draft of a kind is served; empty if the engine has no class for it."""
    named = class_names(config)
    own = EAGLE1.get(str(config.get("model_type")), "LlamaForCausalLMEagle")
    block = "" if DFLASH & set(named) else ', with architectures ["DFlashDraftModel"]'
    return {
        "eagle1": f'serve with --speculative-algorithm EAGLE and architectures ["{own}"]',
        "dflash": f"serve with --speculative-algorithm DFLASH{block}",
        "dspark": "serve with --speculative-algorithm DSPARK",
        "mtp": (
            "serve with --speculative-algorithm EAGLE (NEXTN is its other name), with the class of the target's family"
        ),
        "latent": f'serve with --speculative-algorithm EAGLE3 and architectures ["{LATENT}"]',
        "llama": f'serve with --speculative-algorithm EAGLE3 and architectures ["{ARCHITECTURE}"]',
        "whole": (
            "as a draft of its own it is served with --speculative-algorithm STANDALONE (it needs the target's "
            "tokenizer)"
        ),
    }.get(kind, "")


def loads_kind(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether the config of an EAGLE-3 draft of another layer names the class that loads it."""
    return kind == "latent" and class_names(config)[:1] == [LATENT]
