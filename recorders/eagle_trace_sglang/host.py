"""SGLang as a host: what the entry point `sglang` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place


class SGLang:
    """The server SGLang."""

    name = "sglang"
    title = "SGLang"
    kind: Kind = "server"
    module = "sglang"
    install = "pip install 'eagle-trace[serve]'"

    def takes(self, draft: Path) -> bool:
        """Whether it is in the format that servers load."""
        try:
            return "speculators_model_type" not in read_config(draft)
        except CheckpointError:
            return True  # it says what is wrong

    def record(self, **options: Any) -> Place:
        """Start a server and record it; see `eagle_trace_serving.record.record`."""
        from eagle_trace_serving.record import record

        return record(**options)


HOST = SGLang()
