"""Runs SGLang's own EAGLE-3 worker on any x86-64 CPU, so that a draft can be traced without a GPU.

SGLang's CPU mode needs kernels that its wheel brings for CUDA only, and an Intel AMX processor for
speculative decoding. :func:`cpu_environment` says what to start SGLang's process with; :func:`load`, SGLang's plugin
entry point, does the rest inside it.

Importing this module imports neither torch nor sglang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "cpu_environment", "install", "load"]

#: set in the environment of processes that are to run with these kernels
VARIABLE = "SGLANG_CPU_EAGLE"

_SHIM_DIR = Path(__file__).resolve().parent / "shim"
_SOURCE_ROOT = Path(__file__).resolve().parents[1]
_installed = False


def cpu_environment(env: Mapping[str, str], *, ranks: int = 1) -> dict[str, str]:
    """The environment of a process that is to run SGLang on a CPU: ``env`` and what must be added or changed.

    Use it only on a machine without a usable CUDA device: it hides the compiled ``sgl_kernel``.

    Args:
        env: the environment to start from, usually ``os.environ``; not changed.
        ranks: how many scheduler processes will run (tensor times data parallel).
    """
    ahead = [str(_SHIM_DIR)]
    # From a checkout, a child that has no .pth file of ours must find the package behind the shim as well.
    if _SOURCE_ROOT.name not in {"site-packages", "dist-packages"}:
        ahead.append(str(_SOURCE_ROOT))
    behind = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part not in ahead]
    binding = {}
    if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in env:
        # Without it SGLang wants a NUMA node for each rank. It binds no thread by it unless its AMX kernels are there.
        binding["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
    return {
        **env,
        **binding,
        "PYTHONPATH": os.pathsep.join(ahead + behind),
        VARIABLE: "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang decorates small functions with torch.compile, which wants a C++ compiler at run time.
        "TORCHDYNAMO_DISABLE": "1",
        # Waiting threads that spin take the cores from SGLang's other processes: ten times slower on two cores.
        "OMP_WAIT_POLICY": env.get("OMP_WAIT_POLICY", "PASSIVE"),
        # With two ranks SGLang looks for NCCL and takes a found library for a usable one.
        "SGLANG_NCCL_SO_PATH": env.get("SGLANG_NCCL_SO_PATH", os.devnull),
    }


def load() -> None:
    """SGLang's plugin entry point: `install` in a process that is to run on a CPU, nothing in any other."""
    if os.environ.get(VARIABLE):
        install()


def install() -> bool:
    """Makes this process's SGLang take EAGLE-3 on any CPU; a second call changes nothing.

    - The attention backend SGLang falls back to without Intel AMX becomes the one that knows speculative
      decoding.
    - Drafts are verified by sampling when a request samples. SGLang would verify greedily on a CPU, and so
      ignore temperature, top-k and top-p behind the first token without a word.
    - Model classes that call a GPU kernel of their own get it in plain torch.

    Returns:
        Whether the process is one that :func:`cpu_environment` describes. If not, nothing was touched.
    """
    global _installed
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return False
    if not getattr(_import_sgl_kernel(), "IS_EAGLE_TRACE_SHIM", False):
        return False
    if not _installed:
        _use_speculative_attention()
        _verify_by_sampling()
        _mend_models()
        _installed = True
    return True


def _import_sgl_kernel() -> Any:
    try:
        import sgl_kernel
    except ImportError as error:
        raise RuntimeError(
            f"SGLang is to run on a CPU but its sgl_kernel wheel cannot be imported here ({error}); start "
            "the process with sglang_cpu_eagle.cpu_environment(os.environ)"
        ) from error
    return sgl_kernel


def _use_speculative_attention() -> None:
    """Makes the name ``torch_native`` mean ``intel_amx``, whose operators are ours, for target and draft."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    backends = attention_registry.ATTENTION_BACKENDS
    backends["torch_native"] = backends["intel_amx"]
    create = DraftBackendFactory._create_backend

    def create_backend(self: Any, name: str, factories: dict[str, Callable[[], Any]], *args: Any, **kwargs: Any) -> Any:
        return create(self, name, {**factories, "torch_native": factories["intel_amx"]}, *args, **kwargs)

    DraftBackendFactory._create_backend = create_backend


def _verify_by_sampling() -> None:
    from sglang.srt.speculative import eagle_utils, spec_utils

    from sglang_cpu_eagle import sampling

    if not hasattr(eagle_utils, "_verify_uses_greedy"):
        return  # 0.5.20 and before decide inside a longer function; `releases.py` says so in the manifest
    uses_greedy = eagle_utils._verify_uses_greedy

    def verify_uses_greedy(**choices: bool) -> bool:
        return bool(uses_greedy(**{**choices, "is_cpu": False}))

    eagle_utils._verify_uses_greedy = verify_uses_greedy
    eagle_utils.top_k_renorm_prob = sampling.top_k_renorm_prob
    eagle_utils.top_p_renorm_prob = sampling.top_p_renorm_prob
    eagle_utils.tree_speculative_sampling_target_only = sampling.tree_speculative_sampling_target_only
    eagle_utils.chain_speculative_sampling_triton = sampling.chain_speculative_sampling
    spec_utils.row_argmax = sampling.row_argmax


def _mend_models() -> None:
    from sglang_cpu_eagle import models

    models.mend_on_load()
