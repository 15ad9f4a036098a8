"""vLLM as a host: what the entry point `vllm` of the group `eagle_trace.hosts` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place

if TYPE_CHECKING:
    from eagle_trace.prompts import Prompt
    from eagle_trace_serving.host import Address, Ask, Launch, ServerOptions
    from eagle_trace_serving.requests import Answer, Request


class VLLM:
    """The server vLLM; see `eagle_trace_serving.host.ServingHost` for what each method is."""

    name = "vllm"
    title = "vLLM"
    kind: Kind = "server"
    module = "vllm"
    # its pins and SGLang's exclude each other
    install = (
        "pip install 'eagle-trace[vllm]' in an environment of its own, and run this command there or with --env PYTHON"
    )

    def takes(self, draft: Path) -> bool:
        """It reads what speculators saved as well as the flat format."""
        return draft.is_dir()

    def record(self, **options: Any) -> Place:
        """Start a server and record it; see `eagle_trace_serving.record.record`."""
        from eagle_trace_serving.record import record

        return record(host=self, **options)

    def check(self, options: ServerOptions) -> None:
        """Refuse what cannot work before anything starts."""
        from eagle_trace_vllm.deployment import check

        check(options)

    def launch(self, options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
        """vLLM's own server, started by a module that ends with `record`."""
        from eagle_trace_vllm.deployment import launch

        return launch(options, address, environment)

    def trusts_code(self, options: ServerOptions) -> bool:
        """Whether checkpoints may bring code along."""
        return "--trust-remote-code" in options.host_args

    def ask(self, prompt: Prompt, rid: str, request: Request) -> Ask:
        """Have one prompt answered."""
        from eagle_trace_vllm import asking

        return asking.ask(prompt, rid, request)

    def ask_all(self, rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
        """Have several prompts answered that arrive at once."""
        from eagle_trace_vllm import asking

        return asking.ask_all(rids, token_ids, request)

    def answers(self, reply: Any, rids: Sequence[str]) -> list[Answer]:
        """What was answered."""
        from eagle_trace_vllm import asking

        return asking.answers(reply, rids)

    def abort(self, rid: str) -> None:
        """vLLM gives a request up when its connection ends."""


HOST = VLLM()
