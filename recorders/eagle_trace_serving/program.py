"""What the host objects of all servers have alike (`eagle_trace_serving.host.ServingHost` says what each method is).

Looking at all hosts is cheap: a server's own modules, `deployment` and `asking`, are imported when they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagle_trace.recording.hosts import Kind
from eagle_trace.store import Place

if TYPE_CHECKING:
    from eagle_trace.prompts import Prompt
    from eagle_trace_serving.host import Address, Ask, Launch, ServerOptions
    from eagle_trace_serving.requests import Answer, Request


class ServerProgram:
    """A server by its package.

    Attributes:
        package: the package that has its `deployment` (how it is started) and `asking` (how it is asked).
    """

    package: str
    kind: Kind = "server"

    def _own(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")

    def record(self: Any, **options: Any) -> Place:
        """Start a server and record it; see `eagle_trace_serving.record.record`."""
        from eagle_trace_serving.record import record

        return record(host=self, **options)

    def check(self, options: ServerOptions) -> None:
        """Refuse what cannot work before anything starts."""
        self._own("deployment").check(options)

    def launch(self, options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
        """The server itself, started by a module that ends with `record`."""
        launched: Launch = self._own("deployment").launch(options, address, environment)
        return launched

    def trusts_code(self, options: ServerOptions) -> bool:
        """Whether checkpoints may bring code along."""
        return "--trust-remote-code" in options.host_args

    def ask(self, prompt: Prompt, rid: str, request: Request) -> Ask:
        """Have one prompt answered."""
        asked: Ask = self._own("asking").ask(prompt, rid, request)
        return asked

    def ask_all(self, rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
        """Have several prompts answered that arrive at once."""
        asked: Ask = self._own("asking").ask_all(rids, token_ids, request)
        return asked

    def answers(self, reply: Any, rids: Sequence[str]) -> list[Answer]:
        """What was answered."""
        answered: list[Answer] = self._own("asking").answers(reply, rids)
        return answered

    def abort(self, rid: str) -> Ask | None:
        """Give a request up."""
        asked: Ask | None = self._own("asking").abort(rid)
        return asked
