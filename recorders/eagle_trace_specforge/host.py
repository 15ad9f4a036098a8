"""SpecForge as a host: what the entry point `specforge` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place


class SpecForge:
    """The trainer SpecForge."""

    name = "specforge"
    title = "SpecForge"
    kind: Kind = "trainer"
    module = "specforge"
    install = "pip install --no-deps 'specforge==0.2.0'"

    def takes(self, draft: Path) -> bool:
        """Whether it is in the format that servers load, as SpecForge and others publish it."""
        try:
            config = read_config(draft)
        except CheckpointError:
            return draft.is_dir() and any(draft.glob("training_state*.pt"))
        if "speculators_model_type" in config or config.get("kv_lora_rank") is not None:
            return False  # SpecForge has no class with latent attention
        return "eagle_config" in config or "Eagle" in str(config.get("architectures"))

    def record(self, **options: Any) -> Place:
        """Feed the draft and leave a sealed trace; see `eagle_trace_specforge.record.record`."""
        from eagle_trace_specforge.record import record

        return record(**options)

    def training(self, trainer: Any) -> Any:
        """What of it goes on in `trainer`: see `eagle_trace_specforge.training`."""
        from eagle_trace_specforge.training import training

        return training(trainer)


HOST = SpecForge()
