"""vLLM's plugin entry point (`vllm.general_plugins`): called in every process that vLLM starts, early and maybe often.

It does nothing at all unless one of two variables is set. `EAGLE_TRACE_OUT` arms vLLM's main process, which then arms
the processes it starts with a variable of its own. An exception of a plugin ends vLLM, so none leaves this module.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from eagle_trace_serving.environment import OUT, SESSION

logger = logging.getLogger("vllm.eagle_trace")
#: what says of a class that it was hooked already
_HOOKED = "_eagle_trace"


def load() -> None:
    """Make the control of an armed main process, and a recorder where the draft runs."""
    if not (os.environ.get(OUT) or os.environ.get(SESSION)):
        return
    from eagle_trace_serving.guard import guarded

    with guarded(logger):
        if not os.environ.get(SESSION):
            from eagle_trace_vllm.arming import arm

            arm()
        _hook_workers()


def _hook_workers() -> None:
    """Be told of each worker that has made its model runner and loads its models next.

    This is the one place that every worker of every platform passes.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from eagle_trace.recording.hooks import Hooks
    from eagle_trace_serving.guard import guarded

    @guarded(logger)
    def made(_result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        _watch_drafter(args[0].worker.model_runner)

    if not getattr(WorkerWrapperBase, _HOOKED, False):
        Hooks().wrap(WorkerWrapperBase, "init_device", made)
        setattr(WorkerWrapperBase, _HOOKED, True)


def _watch_drafter(runner: Any) -> None:
    from eagle_trace.recording.hooks import Hooks
    from eagle_trace_serving.guard import guarded
    from eagle_trace_vllm.params import SHARED, loaded_params, watch
    from eagle_trace_vllm.runners import drafter_of

    drafter = drafter_of(runner)
    if drafter is None or getattr(drafter, "method", None) != "eagle3":
        return
    load_model = drafter.load_model
    read: list[dict[str, Any]] = []

    @guarded(logger)
    def loaded(model: Any) -> None:
        folder = Path(drafter.draft_model_config.model)
        read.extend(loaded_params(model, folder, lambda name: not name.endswith(SHARED)))

    def load_and_attach(*args: Any, **kwargs: Any) -> Any:
        with Hooks() as hooks:
            if str(runner.device) == "cpu":
                watch(hooks, loaded)
            result = load_model(*args, **kwargs)
        with guarded(logger):
            _attach(runner, drafter, read or None)
        return result

    drafter.load_model = load_and_attach


def _attach(runner: Any, drafter: Any, read: list[dict[str, Any]] | None) -> None:
    """The draft is loaded: make its recorder, and tell it what the scheduler sends."""
    from eagle_trace.recording.hooks import Hooks
    from eagle_trace_serving.recorder import ServeRecorder
    from eagle_trace_vllm.requests import Announced
    from eagle_trace_vllm.worker import VLLMDraft

    recorder = ServeRecorder.attach(VLLMDraft(runner, drafter, read))
    announced = Announced(recorder, int(runner.vllm_config.model_config.max_model_len))

    def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            announced.step(args[0] if args else kwargs["scheduler_output"])
        except Exception as error:  # noqa: BLE001
            recorder.fail(error)

    Hooks().precede(runner, "execute_model", step)
