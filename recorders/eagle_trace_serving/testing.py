"""A running server as a subject of `eagle_trace.testing.conformance`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace_serving.requests import Answers, Request
from eagle_trace_serving.server import Server


class Served:
    """A server, asked the same prompts each time.

    Args:
        name: of the host, as a manifest has it.
        server: it runs.
        request: what it is asked; greedy, so that its answers can be compared.
    """

    side = "serve"

    def __init__(self, name: str, server: Server, request: Request) -> None:
        self.name = name
        self._server = server
        self._request = request

    def answer(self) -> Answers:
        """Its answers, unrecorded."""
        return self._server.answer(self._request)

    def record(self, out: Path, **options: Any) -> Answers:
        """Its answers, recorded."""
        out.mkdir()
        return self._server.record(self._request, out, **options)

    def hooks(self) -> None:
        """They hang in other processes: what they do to the answers is all that is seen of them."""
