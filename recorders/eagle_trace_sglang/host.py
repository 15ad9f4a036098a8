"""SGLang as a host: what the entry point `sglang` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from typing import Any

from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place


class SGLang:
    """The server SGLang."""

    name = "sglang"
    title = "SGLang"
    kind: Kind = "server"
    module = "sglang"
    extra = "serve"

    def record(self, **options: Any) -> Place:
        """Start a server and record it; see `eagle_trace_serving.record.record`."""
        from eagle_trace_serving.record import record

        return record(**options)


HOST = SGLang()
