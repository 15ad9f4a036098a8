"""On PYTHONPATH of a vLLM under test only: lets tests plant faults in its drafter."""

import os

if os.environ.get("EAGLE_TRACE_TEST_FAULT"):
    from tests.support import vllm_faults

    vllm_faults.hook_plugin()
