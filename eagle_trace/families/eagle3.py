"""The family eagle3: a decoder of Llama's or Qwen3's kind that reads several layers of its target.

Shapes below are those of one call with T rows: H hidden size of the draft, G hidden size of the target, n target layers
whose hidden states are fed, A = heads x head size, K = key/value heads x head size, I intermediate size, V draft
vocabulary. The names of the sites inside decoder layer N start with ``layer.N.``. Dataflow is kept beside the names,
because the first divergence is a site that differs while everything it is computed from agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eagle_trace.families.base import Family, Site

#: a norm is a mean square, a root and a product; a rotation two products; attention scores, softmax and their product
NORM, ROTATION, ATTENTION = 2, 2, 6
#: sites of the attention of decoder layer n, from its projections up to ``attn.context``, by the sites it is fed by
Attention = Callable[[int, tuple[str, ...]], list[Site]]


def _before_layers(target_layers: int) -> list[Site]:
    target = [
        Site(f"target.hidden.{k}", ("G",), "value", "first", ("token",), meaning=f"feature {k} taken from the target")
        for k in range(target_layers)
    ]
    names = tuple(site.name for site in target)
    norms = ("input_norm", *(f"fc_norm.{k}" for k in range(max(1, target_layers))))
    return [
        Site(
            "token", (), "integer", "all", (), kept="rows",
            meaning="token beside the feature: x[root + 1], or the draft's guess",
        ),
        Site("position", (), "integer", "all", (), kept="rows", meaning="position the row is rotated by"),
        *target,
        Site("fused", ("n*G",), "value", "first", names or ("token",), roundings=0, meaning="features side by side"),
        Site(
            "fc.in", ("n*G",), "value", "first", ("fused",), parameters=norms,
            meaning="what the fc projection receives",
        ),
        Site(
            "fc.out", ("H",), "value", "first", ("fc.in",), product=True, parameters=("fc",),
            meaning="target features projected to the draft's width",
        ),
        Site(
            "hidden", ("H",), "value", "all", ("fc.out", "fused"), carried=("carry",), roundings=0,
            meaning="hidden state entering the first decoder layer: fc.out, or the carry of the step before",
        ),
        Site(
            "embed", ("H",), "value", "all", ("token",), parameters=("embed_tokens",), meaning="embedding of the token",
        ),
    ]  # fmt: skip


def _norms(n: int) -> list[Site]:
    """The norms that decoder layer n starts with. Behind the first layer, `hidden_norm` is a name of SGLang's."""
    at, layer = f"layer.{n}", f"layers.{n}"
    if n > 0:
        return [
            Site(
                f"{at}.hidden_norm", ("H",), "value", "all", (f"layer.{n - 1}.out",), kernel_roundings=NORM,
                parameters=(f"{layer}.input_layernorm", f"{layer}.hidden_norm"), meaning="stream after its norm",
            )
        ]  # fmt: skip
    return [
        Site(
            f"{at}.embed_norm", ("H",), "value", "all", ("embed",), kernel_roundings=NORM,
            parameters=(f"{layer}.input_layernorm",), meaning="embedding after input_layernorm",
        ),
        Site(
            f"{at}.hidden_norm", ("H",), "value", "all", ("hidden",), kernel_roundings=NORM,
            parameters=(f"{layer}.hidden_norm",), meaning="hidden state after hidden_norm",
        ),
    ]  # fmt: skip


def _attention(n: int, into: tuple[str, ...]) -> list[Site]:
    at, module = f"layer.{n}.attn", f"layers.{n}.self_attn"
    q = Site(
        f"{at}.q", ("A",), "value", "all", into, product=True, split_by="query heads",
        parameters=(f"{module}.q_proj", f"{module}.q_norm"), meaning="queries before rotation",
    )  # fmt: skip
    k = Site(
        f"{at}.k", ("K",), "value", "all", into, product=True, split_by="key/value heads",
        parameters=(f"{module}.k_proj", f"{module}.k_norm"), meaning="keys before rotation",
    )  # fmt: skip
    turned = replace(q, rotated=True, kernel_roundings=ROTATION, product=False, parameters=())
    return [
        q,
        k,
        replace(k, name=f"{at}.v", parameters=(f"{module}.v_proj",), meaning="values"),
        replace(turned, name=f"{at}.q_rope", inputs=(q.name, "position"), meaning="rotated queries"),
        replace(
            turned, name=f"{at}.k_rope", axes=k.axes, inputs=(k.name, "position"), split_by=k.split_by,
            meaning="rotated keys",
        ),
        Site(
            f"{at}.context", ("A",), "value", "all", (f"{at}.q_rope", f"{at}.k_rope", f"{at}.v"),
            carried=(f"{at}.k_rope", f"{at}.v"), roundings=2, kernel_roundings=ATTENTION, split_by="query heads",
            meaning="attention output before the output projection",
        ),
    ]  # fmt: skip


def _after_attention(n: int, stream: str) -> list[Site]:
    at, module = f"layer.{n}.attn", f"layers.{n}.self_attn"
    return [
        Site(
            f"{at}.out", ("H",), "value", "all", (f"{at}.context",), product=True, parameters=(f"{module}.o_proj",),
            meaning="attention output projection",
        ),
        Site(
            f"{at}.residual", ("H",), "value", "all", (f"{at}.out", stream),
            meaning="residual stream after attention was added",
        ),
    ]  # fmt: skip


def _mlp(n: int) -> list[Site]:
    at, layer = f"layer.{n}", f"layers.{n}"
    gate = Site(
        f"{at}.mlp.gate", ("I",), "value", "all", (f"{at}.mlp.norm",), product=True, split_by="intermediate",
        parameters=(f"{layer}.mlp.gate_proj",), meaning="gate projection",
    )  # fmt: skip
    return [
        Site(
            f"{at}.mlp.norm", ("H",), "value", "all", (f"{at}.attn.residual",), kernel_roundings=NORM,
            parameters=(f"{layer}.post_attention_layernorm",), meaning="stream after its norm",
        ),
        gate,
        replace(gate, name=f"{at}.mlp.up", parameters=(f"{layer}.mlp.up_proj",), meaning="up projection"),
        Site(
            f"{at}.mlp.act", ("I",), "value", "all", (f"{at}.mlp.gate", f"{at}.mlp.up"), roundings=2,
            split_by="intermediate", meaning="activation(gate) * up",
        ),
        Site(
            f"{at}.mlp.out", ("H",), "value", "all", (f"{at}.mlp.act",), product=True,
            parameters=(f"{layer}.mlp.down_proj",), meaning="down projection",
        ),
        Site(
            f"{at}.out", ("H",), "value", "all", (f"{at}.mlp.out", f"{at}.attn.residual"),
            meaning="residual stream after the layer",
        ),
    ]  # fmt: skip


def _layer(n: int, attention: Attention) -> list[Site]:
    norms = _norms(n)
    stream = "hidden" if n == 0 else f"layer.{n - 1}.out"
    return [*norms, *attention(n, tuple(site.name for site in norms)), *_after_attention(n, stream), *_mlp(n)]


def _after_layers(draft_layers: int) -> list[Site]:
    last = f"layer.{draft_layers - 1}.out"
    return [
        Site(
            "norm", ("H",), "value", "all", (last,), kernel_roundings=NORM, parameters=("norm",),
            meaning="final norm, read by the head",
        ),
        Site(
            "carry", ("H",), "value", "all", (last,), roundings=0, meaning="hidden state handed to the next step",
        ),
        Site(
            "logits", ("V",), "value", "all", ("norm",), product=True, parameters=("lm_head",),
            meaning="scores over the draft vocabulary",
        ),
        Site("topk.draft_id", (), "integer", "all", ("logits",), kept="topk", meaning="best draft ids"),
        Site(
            "topk.target_id", (), "integer", "all", ("topk.draft_id",), kept="topk", parameters=("d2t",),
            meaning="their target ids, after d2t",
        ),
    ]  # fmt: skip


def sites(target_layers: int, draft_layers: int, attention: Attention = _attention) -> list[Site]:
    """All sites of a draft of `draft_layers` decoder layers fed by `target_layers` target layers, in forward order.

    `attention` lists the sites between the norms and the output projection, for a family that differs there alone.
    """
    layers = [site for n in range(draft_layers) for site in _layer(n, attention)]
    return [*_before_layers(target_layers), *layers, *_after_layers(draft_layers)]


EAGLE3 = Family("eagle3", sites)
