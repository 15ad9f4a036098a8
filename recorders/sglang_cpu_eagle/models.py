"""What single model classes of SGLang lack on a CPU, put there before a model is loaded.

SGLang imports the modules of all models when it loads the first one; what is mended here is mended then, and only in
processes that load models.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

_RUNNER = "sglang.srt.model_executor.model_runner"


def mend_on_load() -> None:
    """Wrap `ModelRunner.load_model` of this process so that it mends first: now, or when its module is imported.

    A process that loads models imports that module behind its plugins, any other never.
    """
    if (module := sys.modules.get(_RUNNER)) is not None:
        _mend_first(module)
    elif not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    """Has the module of `ModelRunner` wrapped right behind its import, and goes."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders have, with a loader that wraps; None for any other module."""
        if name != _RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _mend_first(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _mend_first(module: Any) -> None:
    runner = getattr(module, "ModelRunner", None)
    if runner is None or not hasattr(runner, "load_model"):
        return
    load = runner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, mend in _MENDED.items():
            with contextlib.suppress(ImportError):  # a release without it, or one that drops it on import
                mend(importlib.import_module(name))
        return load(self, *args, **kwargs)

    runner.load_model = load_model


def _minimax_m2(module: Any) -> None:
    """The norm over all queries and all keys of a row is a Triton kernel, or one of Intel AMX."""
    if hasattr(module, "rms_sumsq_serial"):
        module.rms_sumsq_serial, module.rms_apply_serial = sums_of_squares, norm_by_sums


def sums_of_squares(x1: Tensor, x2: Tensor) -> Tensor:
    """Sums of squares over the rows of both, ``[2, T]`` float32: what ranks add up before `norm_by_sums`."""
    return torch.stack([x.float().square().sum(dim=-1) for x in (x1, x2)])


def norm_by_sums(
    x1: Tensor, x2: Tensor, w1: Tensor, w2: Tensor, sum_sq: Tensor, tp_world: int = 1, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``[T, D1]`` and ``[T, D2]`` by the sums over all ranks, weights ``[D1]`` and ``[D2]``."""

    def normed(x: Tensor, weight: Tensor, sums_T: Tensor) -> Tensor:
        scale_T = torch.rsqrt(sums_T / (x.shape[-1] * tp_world) + eps)
        return (x.float() * scale_T[:, None] * weight.float()).to(x.dtype)

    return normed(x1, w1, sum_sq[0]), normed(x2, w2, sum_sq[1])


def _experts(module: Any) -> None:
    """The experts in plain torch refuse a router weight that goes onto their input (Llama-4)."""
    plain = module.moe_forward_native
    if getattr(plain, "weighs_input", False):
        return
    module.moe_forward_native = weighing_input(plain)


def weighing_input(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SGLang's `moe_forward_native` that also takes `apply_router_weight_on_input`, as its AMX path does."""

    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        if moe_runner_config.apply_router_weight_on_input:
            # one expert for each row: [T, 1] weights
            x = x * topk_output.topk_weights.to(x.dtype)
            topk_output = topk_output._replace(topk_weights=torch.ones_like(topk_output.topk_weights))
            moe_runner_config = replace(moe_runner_config, apply_router_weight_on_input=False)
        return plain(layer, x, topk_output, moe_runner_config)

    moe_forward_native.weighs_input = True  # type: ignore[attr-defined]
    return moe_forward_native


def _llama4(module: Any) -> None:
    """Its attention takes queries and keys to be rotated in place, as the GPU kernel does; on a CPU they are returned,
    and would be dropped: positions would not count. On an NPU, where it is the same, the class uses what is returned.
    """
    module._is_npu = True


def _latent_draft(module: Any) -> None:
    """A draft with latent attention waits for the GPU when it is given the target's embedding, whatever its device."""
    draft = module.Eagle3DeepseekV2ForCausalLM
    for name in ("set_embed", "set_embed_and_head"):
        method = getattr(draft, name)
        if not getattr(method, "waits_for_nothing", False):
            setattr(draft, name, without_waiting(method))


def without_waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, during which `torch.cuda.synchronize` does nothing: without a CUDA device it raises."""

    def called(*args: Any) -> Any:
        wait = torch.cuda.synchronize
        torch.cuda.synchronize = lambda *_: None
        try:
            return method(*args)
        finally:
            torch.cuda.synchronize = wait

    called.waits_for_nothing = True  # type: ignore[attr-defined]
    return called


_MENDED: dict[str, Callable[[Any], None]] = {
    "sglang.srt.models.kimi_k25_eagle3": _latent_draft,
    "sglang.srt.models.llama4": _llama4,
    "sglang.srt.models.minimax_m2": _minimax_m2,
    "sglang.srt.layers.moe.fused_moe_native": _experts,
}
