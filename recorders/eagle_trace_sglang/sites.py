"""Where the sites of the draft forward are found in SGLang's `LlamaForCausalLMEagle3`.

`capture(site, tensor)` is called with the host's own tensor, at once; the receiver copies it before it returns, since
SGLang's fused kernels write in place (norms overwrite both their inputs, rotation overwrites q and k).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from eagle_trace.capture import Shard
from eagle_trace.recorder import Hooks
from eagle_trace_sglang.ranks import key_value_heads, place

Capture = Callable[[str, Any], None]

#: sites of a layer that each tensor-parallel rank computes a part of, by what splits them; all others are whole
QUERY_HEADS = ("attn.q", "attn.q_rope", "attn.context")
KEY_VALUE_HEADS = ("attn.k", "attn.k_rope", "attn.v")
INTERMEDIATE = ("mlp.gate", "mlp.up", "mlp.act")


def _first(output: Any) -> Any:
    """SGLang's parallel linears return (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


def hook_draft(hooks: Hooks, model: Any, capture: Capture) -> list[str]:
    """Hang `capture` into every site of a loaded draft; returns the sites this model has no place for.

    `fused`, token and position come with the call itself, not from a module. A site of `partial_sums` has no place.
    """
    inner = model.model
    missing = partial_sums(model)

    def after(module: Any, site: str, pick: Callable[[Any], Any] = _first) -> None:
        if module is None:
            missing.append(site)
        if site in missing:
            return
        hooks.after(module, lambda _module, _args, output: capture(site, pick(output)))

    if getattr(inner, "fc", None) is not None:
        hooks.before(inner.fc, lambda _module, args, _kwargs: capture("fc.in", args[0]))
        after(inner.fc, "fc.out")
    after(inner.embed_tokens, "embed")
    hooks.before(
        inner.layers[0],
        lambda _module, args, kwargs: capture("hidden", _argument(args, kwargs, 2, "hidden_states")),
    )
    for n, layer in enumerate(inner.layers):
        _hook_layer(hooks, n, layer, after, capture)
    last = len(inner.layers) - 1
    after(inner.norm, "norm", lambda output: output[0])
    after(inner.norm, f"layer.{last}.out", lambda output: output[1])
    # the inner model returns (normed, [what the next step receives])
    after(inner, "carry", lambda output: output[1][0])
    after(model.logits_processor, "logits", lambda output: output.next_token_logits)
    return missing


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[index]


def _hook_layer(hooks: Hooks, n: int, layer: Any, after: Callable[..., None], capture: Capture) -> None:
    at = f"layer.{n}"
    attention, mlp = layer.self_attn, layer.mlp
    if n == 0:
        after(layer.input_layernorm, f"{at}.embed_norm")
        after(layer.hidden_norm, f"{at}.hidden_norm")
    else:
        # a later layer adds the layer before it to the residual inside its own norm
        after(layer.hidden_norm, f"{at}.hidden_norm", lambda output: output[0])
        after(layer.hidden_norm, f"layer.{n - 1}.out", lambda output: output[1])

    q_size, kv_size = attention.q_size, attention.kv_size
    edges = {"q": (0, q_size), "k": (q_size, q_size + kv_size), "v": (q_size + kv_size, q_size + 2 * kv_size)}
    for part, (start, end) in edges.items():
        after(attention.qkv_proj, f"{at}.attn.{part}", lambda output, s=start, e=end: _first(output)[..., s:e])
    after(attention.rotary_emb, f"{at}.attn.q_rope", lambda output: output[0])
    after(attention.rotary_emb, f"{at}.attn.k_rope", lambda output: output[1])
    hooks.before(attention.o_proj, lambda _module, args, _kwargs: capture(f"{at}.attn.context", args[0]))
    after(attention.o_proj, f"{at}.attn.out")
    after(layer.post_attention_layernorm, f"{at}.mlp.norm", lambda output: output[0])
    after(layer.post_attention_layernorm, f"{at}.attn.residual", lambda output: output[1])
    after(
        mlp.gate_up_proj,
        f"{at}.mlp.gate",
        lambda output: _first(output)[..., : _first(output).shape[-1] // 2],
    )
    after(mlp.gate_up_proj, f"{at}.mlp.up", lambda output: _first(output)[..., _first(output).shape[-1] // 2 :])
    after(mlp.act_fn, f"{at}.mlp.act")
    after(mlp.down_proj, f"{at}.mlp.out")


def shard_of(site: str, model: Any) -> Shard | None:
    """Which part of a site's last axis this rank computes; None where every rank computes all of it.

    Features, `fc`, norms and the residual stream are the same on every rank; the embedding is summed over ranks, so are
    the output and down projections (see `partial_sums`), and logits are gathered before they leave the model.
    """
    match = re.fullmatch(r"layer\.(\d+)\.(.+)", site)
    if match is None:
        return None
    layer, part = model.model.layers[int(match.group(1))], match.group(2)
    if part in QUERY_HEADS:
        shard = Shard(*place(layer.self_attn.qkv_proj))
    elif part in KEY_VALUE_HEADS:
        shard = key_value_heads(layer.self_attn.qkv_proj)
    elif part in INTERMEDIATE:
        shard = Shard(*place(layer.mlp.gate_up_proj))
    else:
        return None
    return shard if shard.count > 1 else None


def partial_sums(model: Any) -> list[str]:
    """Sites that this model leaves unsummed on each rank, for a later kernel to add up over the ranks.

    What their modules return is a term of the site and not the site, so they cannot be recorded.
    """
    found = []
    for n, layer in enumerate(model.model.layers):
        outputs = {"attn.out": layer.self_attn.o_proj, "mlp.out": layer.mlp.down_proj}
        found += [
            f"layer.{n}.{part}"
            for part, linear in outputs.items()
            if place(linear)[1] > 1 and not linear.reduce_results
        ]
    return found
