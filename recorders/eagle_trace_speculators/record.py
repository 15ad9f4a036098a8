"""Entry point of the train side: speculators' forward of a draft, recorded."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.store import Place


def record(**options: Any) -> Place:
    """`eagle_trace_training.record.record` with speculators as the trainer; raises HostError where that is missing."""
    from eagle_trace_training.record import record as record_training

    try:
        from eagle_trace_speculators.trainer import Speculators
    except ImportError as error:
        raise HostError(f"speculators cannot be imported ({error}): pip install 'eagle-trace[train]'") from error
    return record_training(Speculators(), **options)
