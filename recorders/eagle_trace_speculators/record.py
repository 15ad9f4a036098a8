"""Recording speculators' forward of a draft that is not in training."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.extras import way_to
from eagle_trace.store import Place
from eagle_trace_training.record import record as record_training


def record(**options: Any) -> Place:
    """`eagle_trace_training.record.record` with speculators as the trainer.

    Raises:
        HostError: speculators is not there, or its installed release cannot be recorded; and what that function raises.
    """
    try:
        import speculators  # noqa: F401
    except ImportError as error:
        raise HostError(f"speculators cannot be imported ({error}): {way_to('train')}") from error
    from eagle_trace_speculators.releases import check_release

    check_release()  # first: the rest cannot be imported beside a release that lacks what is recorded
    from eagle_trace_speculators.trainer import Speculators

    return record_training(Speculators(), **options)
