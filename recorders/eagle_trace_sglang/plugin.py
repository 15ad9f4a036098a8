"""SGLang's plugin entry point (`sglang.srt.plugins`): called in every process that SGLang starts.

It does nothing at all unless one of two variables is set. `EAGLE_TRACE_OUT` arms SGLang's main process, which then
arms the processes it starts with a variable of its own. SGLang only logs what a plugin raises: `record` therefore waits
for the recorder to report.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from eagle_trace_serving.environment import OUT, SESSION

SCHEDULER = "sglang.srt.managers.scheduler"
WORKER = "sglang.srt.speculative.eagle_worker_v2"


def load() -> None:
    """Make the control of an armed main process, or a scheduler's recorder."""
    started = bool(os.environ.get(SESSION))
    # processes of an armed server that schedule nothing (tokenizer, detokenizer) have nothing to record
    if not (SCHEDULER in sys.modules if started else os.environ.get(OUT)):
        return
    import sglang_cpu_eagle
    from eagle_trace_sglang.releases import check_release

    check_release("cpu" if os.environ.get(sglang_cpu_eagle.VARIABLE) else "cuda")
    if started:
        _hook_scheduler()
    else:
        from eagle_trace_sglang.arming import arm

        arm()


def _hook_scheduler() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_trace_serving.recorder import ServeRecorder
    from eagle_trace_sglang.batches import SGLangRequest, is_probe, verified_of
    from eagle_trace_sglang.worker import SGLangDraft

    recorders: dict[int, ServeRecorder] = {}

    def worker_ready(_result: Any, worker: Any, *_args: Any, **_kwargs: Any) -> None:
        # the last thing that changes the draft's parameters (embedding, head, token map) has just happened
        if id(worker) not in recorders:
            recorders[id(worker)] = ServeRecorder.attach(SGLangDraft(worker))

    def verified(result: Any, worker: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder = recorders.get(id(worker._draft_worker))
        if recorder is not None:
            recorder.tell(lambda recording: recording.verified(verified_of(result, batch)))

    def arrived(_result: Any, _scheduler: Any, request: Any, is_retracted: bool = False, **_kwargs: Any) -> None:
        if is_retracted or is_probe(request):
            return
        for recorder in recorders.values():
            recorder.arrived(SGLangRequest(request))

    def dropped(_result: Any, _scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        for recorder in recorders.values():
            recorder.ended(request.rid)
            recorder.between_batches()

    def answered(_result: Any, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        for recorder in recorders.values():
            for request in batch.reqs:
                if request.finished():
                    recorder.ended(request.rid)
            recorder.between_batches()

    after = HookType.AFTER
    HookRegistry.register(f"{WORKER}.EagleDraftWorker.init_lm_head", worker_ready, after)
    HookRegistry.register(f"{WORKER}.EAGLEWorkerV2.verify", verified, after)
    HookRegistry.register(f"{SCHEDULER}.Scheduler._add_request_to_queue", arrived, after)
    HookRegistry.register(f"{SCHEDULER}.Scheduler._release_aborted_request", dropped, after)
    HookRegistry.register(f"{SCHEDULER}.Scheduler.process_batch_result", answered, after)
