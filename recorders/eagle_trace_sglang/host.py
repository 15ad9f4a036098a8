"""SGLang as a host: what the entry point `sglang` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace_serving.program import ServerProgram


class SGLang(ServerProgram):
    """The server SGLang."""

    name = "sglang"
    title = "SGLang"
    module = "sglang"
    package = "eagle_trace_sglang"
    install = way_to("serve")

    def takes(self, draft: Path) -> bool:
        """Whether it is in the format that servers load."""
        try:
            return "speculators_model_type" not in read_config(draft)
        except CheckpointError:
            return True  # it says what is wrong


HOST = SGLang()
