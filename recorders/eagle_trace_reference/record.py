"""Recording the reference forward of a draft."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.extras import way_to
from eagle_trace.store import Place
from eagle_trace_training.record import record as record_training


def record(**options: Any) -> Place:
    """`eagle_trace_training.record.record` with the reference forward in a trainer's place.

    Raises:
        HostError: torch is not there; and what that function raises.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise HostError(f"torch cannot be imported ({error}): {way_to('train')}") from error
    from eagle_trace_reference.trainer import ReferenceForward

    return record_training(ReferenceForward(), **options)
