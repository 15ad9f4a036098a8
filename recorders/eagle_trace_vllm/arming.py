"""Arming vLLM's main process: what says that it serves, and that it ends."""

from __future__ import annotations

import os
import sys
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace_serving import attached
from eagle_trace_serving.guard import guarded
from eagle_trace_vllm.plugin import logger
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
    attached.when_serving(lambda app: hasattr(app.state, "args"), lambda app: _serve(app, armed))


@guarded(logger)
def _serve(app: Any, armed: attached.Armed) -> None:
    # its workers are killed at once
    Hooks().precede(sys.modules[ENGINE].AsyncLLM, "shutdown", lambda *_: armed.ending())
    given = app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]
    # any of several does
    keys = [given] if isinstance(given, str) else given
    armed.add_routes(app, keys, None, lambda endpoint: endpoint)
    armed.ready()
