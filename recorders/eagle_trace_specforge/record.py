"""Recording SpecForge's forward of a draft that is not in training."""

from __future__ import annotations

from typing import Any

from eagle_trace.store import Place
from eagle_trace_specforge.releases import check_release
from eagle_trace_training.record import record as record_training


def record(**options: Any) -> Place:
    """`eagle_trace_training.record.record` with SpecForge as the trainer.

    Raises:
        HostError: SpecForge is not there, or its installed release cannot be recorded; and what that function raises.
    """
    check_release()  # first: the rest cannot be imported beside a release that lacks what is recorded
    from eagle_trace_specforge.trainer import SpecForge

    return record_training(SpecForge(), **options)
