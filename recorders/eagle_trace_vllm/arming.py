"""Arming vLLM's main process: what says that it serves, and that it ends."""

from __future__ import annotations

import os
import sys
from typing import Any

from eagle_trace_serving import attached
from eagle_trace_vllm.releases import RELEASES, check_release

ENGINE = "vllm.v1.engine.async_llm"


def arm() -> None:
    """Make this process's control before vLLM starts its workers, and hook the server's application.

    Raises:
        HostError: this vLLM cannot be recorded.
    """
    from eagle_trace_vllm.host import HOST

    check_release("cpu" if "cpu" in RELEASES.installed()[0] else "cuda")
    armed = attached.arm(HOST)
    _when_serving(lambda app: _serve(app, armed))


def _when_serving(act: Any) -> None:
    """Call `act(app)` for vLLM's application before it answers anything.

    Where vLLM makes its application has moved with nearly every release. What the first thing is that a server asks
    of one has not.
    """
    from fastapi import FastAPI

    build = FastAPI.build_middleware_stack

    def built(self: Any) -> Any:
        if hasattr(self.state, "args"):
            FastAPI.build_middleware_stack = build
            act(self)
        return build(self)

    FastAPI.build_middleware_stack = built


def _serve(app: Any, armed: attached.Armed) -> None:
    from eagle_trace_vllm.plugin import _say

    try:
        engine = sys.modules[ENGINE].AsyncLLM
        shutdown = engine.shutdown

        def ending(self: Any, *args: Any, **kwargs: Any) -> Any:
            # workers are killed at once
            armed.ending()
            return shutdown(self, *args, **kwargs)

        engine.shutdown = ending
        given = app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        # any of several does
        keys = [given] if isinstance(given, str) else given
        armed.add_routes(app, keys, None, lambda endpoint: endpoint)
        armed.ready()
    except Exception as error:  # noqa: BLE001 (the server must serve all the same)
        _say(error)
