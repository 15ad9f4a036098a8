"""SGLang's plugin entry point (`sglang.srt.plugins`): called in every process that SGLang starts.

SGLang only logs what a plugin raises. So this module does nothing at all unless `record` armed it, and `record` waits
for the recorder to report: without that report there is no recording, and `record` fails.
"""

from __future__ import annotations

import os
from typing import Any

from eagle_trace_sglang.session import ARMED

#: set beside SGLANG_USE_CPU_ENGINE when our CPU kernels stand in for the CUDA-only wheel
CPU_KERNELS = "EAGLE_TRACE_CPU_KERNELS"

WORKER = "sglang.srt.speculative.eagle_worker_v2"


def load() -> None:
    """Install the CPU kernels if asked to, and hang the recorder into the draft worker if armed."""
    if os.environ.get(CPU_KERNELS):
        from eagle_trace_sglang import cpu

        cpu.install()
    if not os.environ.get(ARMED):
        return
    from eagle_trace_sglang.releases import check_release

    check_release("cpu" if os.environ.get(CPU_KERNELS) else "cuda")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_trace_sglang.recorder import ServeRecorder

    recorders: dict[int, ServeRecorder] = {}

    def worker_ready(_result: Any, worker: Any, *_args: Any, **_kwargs: Any) -> None:
        # the last thing that changes the draft's parameters (embedding, head, token map) has just happened
        if id(worker) not in recorders:
            recorders[id(worker)] = ServeRecorder.attach(worker)

    def verified(result: Any, worker: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder = recorders.get(id(worker._draft_worker))
        if recorder is not None:
            recorder.verified(result, batch)

    HookRegistry.register(f"{WORKER}.EagleDraftWorker.init_lm_head", worker_ready, HookType.AFTER)
    HookRegistry.register(f"{WORKER}.EAGLEWorkerV2.verify", verified, HookType.AFTER)
