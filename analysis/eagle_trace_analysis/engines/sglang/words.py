"""What advice calls SGLang's options and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.engines.base import Words

UPDATE = "update SGLang, or report it with these rows"
WORDS = Words(
    ids_key="eagle_config.eagle_aux_hidden_state_layer_ids",
    counts="outputs",
    whole_prompts=f"serve with --chunked-prefill-size -1, so that no prompt is cut; {UPDATE}",
    no_prefix_cache="--disable-radix-cache",
    run_all_drafts=f"give --context-length room for the longest answer and its drafts; {UPDATE}",
)


def ids_unread(config: Mapping[str, Any]) -> str:  # noqa: ARG001
    """Nothing: there is one loader."""
    return ""
