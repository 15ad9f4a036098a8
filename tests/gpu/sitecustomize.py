"""On PYTHONPATH of a server that `check.py` starts: counts what makes its scheduler wait for the GPU in a draft."""

import os
import sys

if os.environ.get("EAGLE_TRACE_GPU_WAITS"):
    from eagle_trace_sglang import plugin

    load = plugin.load

    def loaded() -> None:
        """The plugin's entry point, and a count around every draft."""
        load()
        if plugin.SCHEDULER in sys.modules and os.environ.get(plugin.SESSION):
            from tests.gpu.waits import count_waits

            count_waits(os.environ["EAGLE_TRACE_GPU_WAITS"])

    plugin.load = loaded
