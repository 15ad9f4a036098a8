"""Faults inside a running vLLM's drafter, for tests: one server, and the fault of the moment is read from a file.

`sitecustomize` (in `vllm_fault_site`) calls `hook_plugin` in every process of the server; the drafter is patched before
the recorder is attached to it. Every patched module asks `current` on each call, so that one server can be recorded
with many faults; without a name in the file it computes as ever. What both servers have in common is patched as in
SGLang (`engine_faults`).
"""

from __future__ import annotations

import copy
from typing import Any

from tests.support.engine_faults import _one_nan, _patch_norm, _patch_output, _patch_rope, _swap_heads, _swap_two
from tests.support.engine_inputs import FILE, current

__all__ = ["FILE", "current", "hook_plugin"]


def hook_plugin() -> None:
    """Patch each drafter before the plugin attaches a recorder to it."""
    from eagle_trace_vllm import plugin

    attach = plugin._attach

    def attached(runner: Any, drafter: Any, read: Any) -> None:
        install(drafter)
        attach(runner, drafter, read)

    plugin._attach = attached


def install(drafter: Any) -> None:
    """Patch the draft of a loaded drafter."""
    model = drafter.model
    layer = model.model.layers[0]
    # layers with equal settings share one rotary module, the target's among them: those must keep their own
    layer.self_attn.rotary_emb = copy.deepcopy(layer.self_attn.rotary_emb)
    for norm in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, model.model.norm):
        _patch_norm(norm)
    _patch_rope(layer.self_attn.rotary_emb)
    attention = layer.self_attn
    _patch_output(attention.qkv_proj, "qkv-heads", lambda *given: _swap_heads(attention, given[-1]))
    _patch_output(attention.qkv_proj, "two-heads", lambda *given: _swap_two(attention, given[-1]))
    _patch_output(layer.mlp.down_proj, "nan", _one_nan)
    for module, name in ((attention.o_proj, "attention-not-reduced"), (layer.mlp.down_proj, "mlp-not-reduced")):
        _patch_output(module, name, _half_product)
    _patch_carry(model)
    _patch_features(drafter)
    _patch_inputs(drafter, model)


def _half_product(module: Any, args: Any, _output: Any) -> Any:
    """The part of a product that the first of two ranks would hold: vLLM packed the weight, so by its inputs."""
    x = args[0].clone()
    x[..., x.shape[-1] // 2 :] = 0
    product = module.quant_method.apply(module, x)
    return product[0] if isinstance(product, tuple) else product


def _patch_carry(model: Any) -> None:
    def normed(_module: Any, _args: Any, output: Any) -> Any:
        return (output[0], output[0]) if current() == "carry" else None

    model.register_forward_hook(normed)


def _patch_features(drafter: Any) -> None:
    """What the drafter is fed of the target, runner V1."""
    propose = drafter.propose

    def faulty(*args: Any, **kwargs: Any) -> Any:
        import torch

        fault, hidden = current(), kwargs["target_hidden_states"]
        a, b, c = hidden.chunk(3, dim=-1)
        made = {"permuted": (b, a, c), "zeros": (a, 0 * b, c), "twice": (a, a, c)}.get(fault)
        if made is not None:
            kwargs["target_hidden_states"] = torch.cat(made, dim=-1)
        elif fault == "features-late":
            kwargs["target_hidden_states"] = hidden.roll(1, dims=0)
        return propose(*args, **kwargs)

    drafter.propose = faulty


def _patch_inputs(drafter: Any, model: Any) -> None:
    """Positions and tokens of the draft steps, as the model gets them; the drafter's own buffers stay right."""
    state = {"step": 0}
    propose = drafter.propose

    def begun(*args: Any, **kwargs: Any) -> Any:
        state["step"] = 0
        return propose(*args, **kwargs)

    def given(_module: Any, args: Any, kwargs: Any) -> Any:
        step, fault = state["step"], current()
        state["step"] += 1
        if not step:
            return None
        if fault == "positions-steps":
            return args, kwargs | {"positions": kwargs["positions"] + 7}
        if fault == "positions-growing":
            return args, kwargs | {"positions": kwargs["positions"] + step}
        if fault == "draft-unmapped":
            import torch

            offsets = model.draft_id_to_target_id
            targets = torch.arange(len(offsets)) + offsets
            return args, kwargs | {"input_ids": torch.searchsorted(targets, kwargs["input_ids"])}
        return None

    drafter.propose = begun
    # before the recorder's own hook, which is hung up when a recording begins
    model.register_forward_pre_hook(given, with_kwargs=True)
