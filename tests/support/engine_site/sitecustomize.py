"""On PYTHONPATH of a server under test only: lets tests plant faults inside the engine's processes."""

import os

if os.environ.get("EAGLE_TRACE_TEST_FAULT"):
    from tests.support import engine_faults

    engine_faults.hook_plugin()

if os.environ.get("EAGLE_TRACE_TEST_DISK"):
    from tests.support import disk_faults

    disk_faults.hook()

if os.environ.get("EAGLE_TRACE_TEST_NEVER_CAPTURES"):
    from tests.support import never_captures

    never_captures.hook()
