"""A target class that forgets to capture: SGLang asks its target for no layers, whatever the draft's config wants.

`sitecustomize` (in `engine_site`) calls `hook` in every process of a server under test.
"""

from __future__ import annotations

import os
from typing import Any

#: environment variable: set for a server whose target forgets
VARIABLE = "EAGLE_TRACE_TEST_NEVER_CAPTURES"
_ASKED = "sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture"


def hook() -> None:
    """Wrap eagle-trace's plugin entry point, which every scheduler of the server loads before its target."""
    from eagle_trace_sglang import plugin

    load = plugin.load

    def loaded() -> None:
        load()
        if os.environ.get(plugin.SESSION):
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            HookRegistry.register(_ASKED, _forget, HookType.REPLACE)

    plugin.load = loaded


def _forget(**_: Any) -> None:
    """Nothing: the target stays as it was built."""
