"""speculators as a host: what the entry point `speculators` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace_training.entry import Trainer


def takes(draft: Path) -> bool:
    """Whether speculators saved it."""
    try:
        return "speculators_model_type" in read_config(draft)
    except CheckpointError:
        return True  # it says what is wrong


HOST = Trainer(
    name="speculators",
    title="speculators",
    module="speculators",
    install=way_to("train"),
    package="eagle_trace_speculators",
    takes=takes,
    form="the folder is one that speculators saved",
)
