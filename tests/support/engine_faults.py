"""Faults inside a running SGLang, for tests: one engine, and the fault of the moment is read from a file.

`sitecustomize` (in `engine_site`) calls `hook_plugin` in every process of the server. The wrapped entry point of the
plugin hangs `install` behind the load of the draft worker. Every patched module asks `current` on each call, so that
one server can be recorded with many faults; without a name in the file it computes as ever.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from tests.support import engine_inputs
from tests.support.engine_inputs import FILE, current

__all__ = ["FILE", "LIMIT", "current", "hook_plugin"]

EPS, THETA, WINDOW, LIMIT = 1e-2, 500.0, 24, 32


def hook_plugin() -> None:
    """Wrap eagle-trace's plugin entry point."""
    from eagle_trace_sglang import plugin

    load = plugin.load

    def loaded() -> None:
        started = os.environ.get(plugin.SESSION)
        load()
        if not started:
            return  # the main process, which holds no draft: what it hooks would come down to those it forks
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{plugin.WORKER}.EagleDraftWorker.init_lm_head", install, HookType.AFTER)

    plugin.load = loaded


def install(_result: Any, worker: Any, *_args: Any, **_kwargs: Any) -> None:
    """Patch the draft of a loaded worker."""
    model = worker.draft_runner.model
    inner = model.model
    layer = inner.layers[0]
    # SGLang shares one rotary embedding among all models that ask for the same: the target must keep its own
    layer.self_attn.rotary_emb = copy.deepcopy(layer.self_attn.rotary_emb)
    state: dict[str, Any] = {"batch": None}
    _watch_batch(inner, layer, state)
    for norm in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, inner.norm):
        _patch_norm(norm)
    _patch_rope(layer.self_attn.rotary_emb)
    _patch_output(layer.self_attn.qkv_proj, "qkv-heads", lambda *given: _swap_heads(layer.self_attn, given[-1]))
    _patch_output(layer.self_attn.qkv_proj, "two-heads", lambda *given: _swap_two(layer.self_attn, given[-1]))
    _patch_output(layer.self_attn.o_proj, "attention-not-reduced", _half_product)
    _patch_output(layer.mlp.down_proj, "mlp-not-reduced", _half_product)
    _patch_output(layer.mlp.down_proj, "nan", _one_nan)
    _patch_cache(worker.draft_runner.token_to_kv_pool, state)
    engine_inputs.install(worker)


def _patch_output(module: Any, name: str, change: Callable[[Any, Any, Any], Any]) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        if current() != name:
            return None
        first = output[0] if isinstance(output, tuple) else output
        changed = change(module, args, first)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    module.register_forward_hook(hook)


def _half_product(module: Any, args: Any, _output: Any) -> Any:
    """The part of a product that the first of two ranks would hold."""
    x = args[0]
    half = x.shape[-1] // 2
    return x[..., :half] @ module.weight[:, :half].T


def _one_nan(_module: Any, _args: Any, output: Any) -> Any:
    changed = output.clone()
    changed[-1, 0] = float("nan")
    return changed


def _swap_heads(attention: Any, output: Any) -> Any:
    size, head = attention.q_size, attention.head_dim
    queries = output[..., :size].reshape(*output.shape[:-1], -1, head)
    import torch

    return torch.cat([queries.flip(-2).reshape(*output.shape[:-1], size), output[..., size:]], dim=-1)


def _swap_two(attention: Any, output: Any) -> Any:
    """Query heads 0 and 2 exchanged."""
    head = attention.head_dim
    changed = output.clone()
    changed[..., :head], changed[..., 2 * head : 3 * head] = output[..., 2 * head : 3 * head], output[..., :head]
    return changed


def _patch_norm(norm: Any) -> None:
    eps, forward = norm.variance_epsilon, norm.forward
    right, moved = norm.weight.data.clone(), norm.weight.data + 1

    def faulty(*args: Any, **kwargs: Any) -> Any:
        fault = current()
        norm.variance_epsilon = EPS if fault == "eps" else eps
        norm.weight.data = moved if fault == "offset" else right
        return forward(*args, **kwargs)

    norm.forward = faulty


def _patch_rope(rope: Any) -> None:
    forward, neox = rope.forward, rope.is_neox_style

    def faulty(positions: Any, *args: Any, **kwargs: Any) -> Any:
        fault = current()
        rope.is_neox_style = not neox if fault == "interleaved" else neox
        if fault == "reach":
            positions = positions.clamp(max=LIMIT - 1)
        if fault != "theta":
            return forward(positions, *args, **kwargs)
        right, base = rope.cos_sin_cache, rope.base
        rope.base = THETA
        rope.cos_sin_cache = rope._compute_cos_sin_cache().to(right)
        try:
            return forward(positions, *args, **kwargs)
        finally:
            rope.base, rope.cos_sin_cache = base, right

    rope.forward = faulty


def _watch_batch(inner: Any, layer: Any, state: dict[str, Any]) -> None:
    """Faults that need the whole forward: features, the carry's norm, the window."""
    forward, window = inner.forward, layer.self_attn.attn.sliding_window_size

    def faulty(input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        fault = current()
        state["batch"] = batch
        inner.norm_output = fault == "carry"
        layer.self_attn.attn.sliding_window_size = WINDOW - 1 if fault == "window" else window
        return forward(input_ids, positions, batch, *args, **kwargs)

    def change_features(_module: Any, args: Any, kwargs: Any) -> None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        if batch.forward_mode.name == "DECODE" or current() not in ("permuted", "zeros", "twice"):
            return
        hidden = batch.spec_info.hidden_states
        a, b, c = hidden.chunk(3, dim=-1)
        import torch

        parts = {"permuted": (b, a, c), "zeros": (a, 0 * b, c), "twice": (a, a, c)}[current()]
        batch.spec_info.hidden_states = torch.cat(parts, dim=-1)

    inner.forward = faulty
    # before the recorder's own hook, which is hung up when a recording begins
    inner.register_forward_pre_hook(change_features, with_kwargs=True)


def _patch_cache(pool: Any, state: dict[str, Any]) -> None:
    """`stale`: the extend after a verify round leaves the slots of accepted tokens as the draft steps left them."""
    write = pool.set_kv_buffer

    def faulty(layer: Any, location: Any, *args: Any, **kwargs: Any) -> Any:
        batch = state["batch"]
        if current() != "stale" or batch is None or batch.forward_mode.name != "DRAFT_EXTEND_V2":
            return write(layer, location, *args, **kwargs)
        slots = getattr(location, "loc", location)
        accepted = batch.spec_info.num_accept_tokens.tolist()
        each = len(slots) // len(accepted)
        # the last of the drafted tokens was never fed, so no draft step has left a key for it
        kept = [b * each + i for b, count in enumerate(accepted) for i in range(min(count - 1, each - 2))]
        at = slots[kept]
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        old = keys[at].clone(), values[at].clone()
        result = write(layer, location, *args, **kwargs)
        keys[at], values[at] = old
        return result

    pool.set_kv_buffer = faulty
