"""vLLM as a host: what the entry point `vllm` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.extras import way_to
from eagle_trace_serving.program import ServerProgram


class VLLM(ServerProgram):
    """The server vLLM."""

    name = "vllm"
    title = "vLLM"
    module = "vllm"
    package = "eagle_trace_vllm"
    # its pins and SGLang's exclude each other
    install = f"{way_to('vllm')} in an environment of its own, and run this command there or with --env PYTHON"

    def takes(self, draft: Path) -> bool:
        """It reads what speculators saved as well as the flat format."""
        return draft.is_dir()


HOST = VLLM()
