"""SpecForge as a host: what the entry point `specforge` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace_training.entry import Trainer


def takes(draft: Path) -> bool:
    """Whether it is in the format that servers load, as SpecForge and others publish it."""
    try:
        config = read_config(draft)
    except CheckpointError:
        return draft.is_dir() and any(draft.glob("training_state*.pt"))
    if "speculators_model_type" in config or config.get("kv_lora_rank") is not None:
        return False  # SpecForge has no class with latent attention
    return "eagle_config" in config or "Eagle" in str(config.get("architectures"))


HOST = Trainer(
    name="specforge",
    title="SpecForge",
    module="specforge",
    install="pip install --no-deps 'specforge==0.2.0'",
    package="eagle_trace_specforge",
    takes=takes,
    form="the folder is flat, in the format that servers load",
)
