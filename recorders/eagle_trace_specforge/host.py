"""SpecForge as a host: what the entry point `specforge` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from typing import Any

from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place


class SpecForge:
    """The trainer SpecForge."""

    name = "specforge"
    title = "SpecForge"
    kind: Kind = "trainer"
    module = "specforge"
    extra = "specforge"

    def record(self, **options: Any) -> Place:
        """Feed the draft and leave a sealed trace; see `eagle_trace_specforge.record.record`."""
        from eagle_trace_specforge.record import record

        return record(**options)


HOST = SpecForge()
