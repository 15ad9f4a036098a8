"""What advice calls vLLM's options and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.engines.base import Words

V2 = "runner V2 (VLLM_USE_V2_MODEL_RUNNER=1), which does it right"
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
WORDS = Words(
    ids_key=IDS_KEY,
    counts="inputs",
    whole_prompts=f"serve with --max-num-batched-tokens no less than the longest prompt, or with {V2}",
    no_prefix_cache="--no-enable-prefix-caching",
    run_all_drafts=f"keep --max-model-len above the longest prompt with its answer and drafts, or serve with {V2}",
)


def ids_unread(config: Mapping[str, Any]) -> str:
    """Runner V2 reads ids at the top level, and of a config in speculators format."""
    if config.get(IDS_KEY) or not (config.get("eagle_config") or {}).get(IDS_KEY):
        return ""
    return "runner V2, the default on GPUs, reads no ids in eagle_config"
