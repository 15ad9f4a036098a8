"""The reference forward as a host: what the entry point `reference` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place

#: the class of the drafts whose forward is written down here
CLASS = "Eagle3DeepseekV2ForCausalLM"


class Reference:
    """eagle-trace's own forward of drafts with latent attention."""

    name = "reference"
    title = "eagle-trace's own reference forward"
    kind: Kind = "trainer"
    module = "torch"
    install = way_to("train")
    stands_in = True

    def takes(self, draft: Path) -> bool:
        """Whether its config names the class, or describes latent attention in an EAGLE-3 draft."""
        try:
            config = read_config(draft)
        except CheckpointError:
            return False
        return is_latent(config)

    def record(self, **options: Any) -> Place:
        """Feed the draft and leave a sealed trace; see `eagle_trace_training.record.record`."""
        from eagle_trace_reference.record import record

        return record(**options)


def is_latent(config: dict[str, Any]) -> bool:
    """Whether a flat config is that of an EAGLE-3 draft with latent attention."""
    if "speculators_model_type" in config:
        return False
    named = config.get("architectures")
    latent = config.get("kv_lora_rank") is not None and "eagle_config" in config
    return latent or (isinstance(named, list) and CLASS in named)


HOST = Reference()
