"""SGLang as a host: what the entry point `sglang` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place

if TYPE_CHECKING:
    from eagle_trace.prompts import Prompt
    from eagle_trace_serving.host import Address, Ask, Launch, ServerOptions
    from eagle_trace_serving.requests import Answer, Request


class SGLang:
    """The server SGLang; see `eagle_trace_serving.host.ServingHost` for what each method is."""

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

        return record(host=self, **options)

    def check(self, options: ServerOptions) -> None:
        """Refuse what cannot work before anything starts."""
        from eagle_trace_sglang.deployment import check_deployment, check_parallelism

        check_parallelism(options.host_args)
        check_deployment(options.target, options.draft)

    def launch(self, options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
        """SGLang's own server, started by a module that ends with `record`."""
        from eagle_trace_sglang.deployment import launch

        return launch(options, address, environment)

    def trusts_code(self, options: ServerOptions) -> bool:
        """Whether checkpoints may bring code along."""
        return "--trust-remote-code" in options.host_args

    def ask(self, prompt: Prompt, rid: str, request: Request) -> Ask:
        """Have one prompt answered."""
        from eagle_trace_sglang import asking

        return asking.ask(prompt, rid, request)

    def ask_all(self, rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
        """Have several prompts answered that arrive at once."""
        from eagle_trace_sglang import asking

        return asking.ask_all(rids, token_ids, request)

    def answers(self, reply: Any, rids: Sequence[str]) -> list[Answer]:
        """What was answered."""
        from eagle_trace_sglang import asking

        return asking.answers(reply, rids)

    def abort(self, rid: str) -> Ask:
        """Give a request up."""
        from eagle_trace_sglang import asking

        return asking.abort(rid)


HOST = SGLang()
