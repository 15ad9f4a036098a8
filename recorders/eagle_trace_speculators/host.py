"""speculators as a host: what the entry point `speculators` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place


class Speculators:
    """The trainer speculators."""

    name = "speculators"
    title = "speculators"
    kind: Kind = "trainer"
    module = "speculators"
    install = way_to("train")

    def takes(self, draft: Path) -> bool:
        """Whether speculators saved it."""
        try:
            return "speculators_model_type" in read_config(draft)
        except CheckpointError:
            return True  # it says what is wrong

    def record(self, **options: Any) -> Place:
        """Feed the draft and leave a sealed trace; see `eagle_trace_speculators.record.record`."""
        from eagle_trace_speculators.record import record

        return record(**options)

    def training(self, trainer: Any) -> Any:
        """What of it goes on in `trainer`: see `eagle_trace_speculators.training`."""
        from eagle_trace_speculators.training import training

        return training(trainer)


HOST = Speculators()
