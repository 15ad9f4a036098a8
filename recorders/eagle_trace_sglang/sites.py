"""Where the sites of the draft forward are found in SGLang's `LlamaForCausalLMEagle3`.

`capture(site, tensor)` is called with the host's own tensor, at once; the receiver copies it before it returns, since
SGLang's fused kernels write in place (norms overwrite both their inputs, rotation overwrites q and k).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_trace.capture import Shard
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace_sglang.layers import draft_layers
from eagle_trace_sglang.ranks import key_value_heads, place

Capture = Callable[[str, Any], None]

#: sites of a layer that each tensor-parallel rank computes a part of, by what splits them; all others are whole
QUERY_HEADS = ("attn.q", "attn.q_rope", "attn.context")
KEY_VALUE_HEADS = ("attn.k", "attn.k_rope", "attn.v")
INTERMEDIATE = ("mlp.gate", "mlp.up", "mlp.act")


def _first(output: Any) -> Any:
    """SGLang's parallel linears return (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class _Place:
    """What the model has at a path, or that it has nothing there: `place.fc.weight` never fails."""

    _path: str
    _found: Any

    @property
    def is_module(self) -> bool:
        """Whether a hook can be hung there."""
        return hasattr(self._found, "register_forward_hook")

    def __getattr__(self, name: str) -> _Place:
        return _Place(f"{self._path}.{name}", getattr(self._found, name, None))


def hook_draft(hooks: Hooks, model: Any, capture: Capture) -> dict[str, str]:
    """Hang `capture` into every site of a loaded draft.

    `fused`, token and position come with the call itself, not from a module. Sites of `partial_sums` are left out.

    Returns:
        The sites this model has no place for, and what it lacks.

    Raises:
        HostError: see `draft_layers`.
    """
    layers = draft_layers(model)
    inner = _Place("model", model.model)
    missing: dict[str, str] = {}
    unsummed = partial_sums(model)
    running = [0]  # the layer whose attention runs

    def after(place: _Place, site: str, pick: Callable[[Any], Any] = _first, *, layer: int | None = None) -> None:
        if not place.is_module:
            missing[site] = place._path
        if not place.is_module or site in unsummed:
            return

        def taken(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
            if layer in (None, running[0]):
                capture(site, pick(output))

        hooks.after(place._found, taken)

    def before(place: _Place, site: str, index: int = 0, name: str = "") -> None:
        if not place.is_module:
            missing[site] = place._path
        else:
            hooks.before(
                place._found, lambda _module, args, kwargs: capture(site, _argument(args, kwargs, index, name))
            )

    before(inner.fc, "fc.in")
    after(inner.fc, "fc.out")
    after(inner.embed_tokens, "embed")
    before(_Place(*layers[0]), "hidden", 2, "hidden_states")
    for n, layer in enumerate(layers):
        if (attention := getattr(layer[1], "self_attn", None)) is not None:
            hooks.before(attention, lambda *_, n=n: running.__setitem__(0, n))
        _hook_layer(n, _Place(*layer), after, before)
    last = len(layers) - 1
    after(inner.norm, "norm", lambda output: output[0])
    after(inner.norm, f"layer.{last}.out", lambda output: output[1])
    # the inner model returns (normed, [what the next step receives])
    after(inner, "carry", lambda output: output[1][0])
    after(_Place("logits_processor", model.logits_processor), "logits", lambda output: output.next_token_logits)
    return missing


def tell_missing(manifest: Manifest, missing: Mapping[str, str]) -> None:
    """Write the sites that a draft has no place for (as `hook_draft` returns them) into a manifest."""
    manifest.not_materialised += [
        {"site": site, "rows": "all", "why": f"SGLang's draft class has no {place}"} for site, place in missing.items()
    ]
    if missing:
        manifest.warnings.append(
            f"this SGLang's draft class has no {', '.join(sorted(set(missing.values())))}: "
            f"not recorded are {', '.join(missing)}"
        )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[index]


def _hook_layer(n: int, layer: _Place, after: Callable[..., None], before: Callable[..., None]) -> None:
    at = f"layer.{n}"
    attention, mlp = layer.self_attn, layer.mlp
    if n == 0:
        after(layer.input_layernorm, f"{at}.embed_norm")
        after(layer.hidden_norm, f"{at}.hidden_norm")
    else:
        # a later layer adds the layer before it to the residual inside its own norm
        after(layer.hidden_norm, f"{at}.hidden_norm", lambda output: output[0])
        after(layer.hidden_norm, f"layer.{n - 1}.out", lambda output: output[1])

    # without the sizes, a fused projection cannot be told apart into its parts
    lacking = next((size for size in (attention.q_size, attention.kv_size) if size._found is None), None)
    q_size, kv_size = (0, 0) if lacking else (attention.q_size._found, attention.kv_size._found)
    edges = {"q": (0, q_size), "k": (q_size, q_size + kv_size), "v": (q_size + kv_size, q_size + 2 * kv_size)}
    for part, (start, end) in edges.items():
        fused = lacking or attention.qkv_proj
        after(fused, f"{at}.attn.{part}", lambda output, s=start, e=end: _first(output)[..., s:e])
    # layers with equal settings share one rotary module
    after(attention.rotary_emb, f"{at}.attn.q_rope", lambda output: output[0], layer=n)
    after(attention.rotary_emb, f"{at}.attn.k_rope", lambda output: output[1], layer=n)
    before(attention.o_proj, f"{at}.attn.context")
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
    layer, part = _Place(*draft_layers(model)[int(match.group(1))]), match.group(2)
    linear = layer.mlp.gate_up_proj if part in INTERMEDIATE else layer.self_attn.qkv_proj
    if part not in (*QUERY_HEADS, *KEY_VALUE_HEADS, *INTERMEDIATE) or not linear.is_module:
        return None
    shard = key_value_heads(linear._found) if part in KEY_VALUE_HEADS else Shard(*place(linear._found))
    return shard if shard.count > 1 else None


def partial_sums(model: Any) -> list[str]:
    """Sites that this model leaves unsummed on each rank, for a later kernel to add up over the ranks.

    What their modules return is a term of the site and not the site, so they cannot be recorded.
    """
    found = []
    for n, (path, module) in enumerate(draft_layers(model)):
        layer = _Place(path, module)
        outputs = {"attn.out": layer.self_attn.o_proj, "mlp.out": layer.mlp.down_proj}
        found += [
            f"layer.{n}.{part}"
            for part, linear in outputs.items()
            if linear.is_module and place(linear._found)[1] > 1 and not linear._found.reduce_results
        ]
    return found
