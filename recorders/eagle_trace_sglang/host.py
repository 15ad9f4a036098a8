"""SGLang as a host: what the entry point `sglang` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.extras import way_to
from eagle_trace_serving.program import ServerProgram

if TYPE_CHECKING:
    from eagle_trace_serving.host import ServerOptions


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

    def check(self, options: ServerOptions) -> None:
        """Refuse what cannot work before anything starts."""
        from eagle_trace_sglang.deployment import check_deployment, check_parallelism

        check_parallelism(options.host_args)
        check_deployment(options.target, options.draft)


HOST = SGLang()
