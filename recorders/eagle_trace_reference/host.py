"""The reference forward as a host: what the entry point `reference` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import class_names, read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace_training.entry import Trainer

#: the class of the drafts whose forward is written down here
CLASS = "Eagle3DeepseekV2ForCausalLM"


def takes(draft: Path) -> bool:
    """Whether its config names the class, or describes latent attention in an EAGLE-3 draft."""
    try:
        config = read_config(draft)
    except CheckpointError:
        return False
    return is_latent(config)


def is_latent(config: dict[str, Any]) -> bool:
    """Whether a flat config is that of an EAGLE-3 draft with latent attention."""
    if "speculators_model_type" in config:
        return False
    latent = config.get("kv_lora_rank") is not None and "eagle_config" in config
    return latent or CLASS in class_names(config)


HOST = Trainer(
    name="reference",
    title="eagle-trace's own reference",
    module="torch",
    install=way_to("train"),
    package="eagle_trace_reference",
    takes=takes,
    form="its attention is latent (MLA), which no trainer that can be recorded has",
    stands_in=True,
)
