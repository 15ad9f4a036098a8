"""Every step of an eagle3 draft's forward, recomputed in numpy from recorded inputs.

A step takes what the trace recorded just before it, so an error here is this step's own: nothing is carried over
from the steps before. Shapes: T rows, C channels of the output (all, or a sample of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.replay.attention import attend
from eagle_trace_analysis.replay.inputs import Inputs, NotReplayedError, rotate, silu

Real = NDArray[Any]


def fc_in(i: Inputs, _: str) -> Real:
    """Target features as they enter fc: normed all together, each by itself, or not at all."""
    x = i.site("fused")
    if i.form.norm_before_fc:
        x = i.norm(x, "input_norm.weight")
    if i.form.fc_norm:
        width = i.form.target_width
        parts = [x[:, k * width : (k + 1) * width] for k in range(x.shape[1] // width)]
        x = np.concatenate([i.norm(part, f"fc_norm.{k}.weight") for k, part in enumerate(parts)], axis=1)
    return x[:, i.channels]


def fc_out(i: Inputs, _: str) -> Real:
    """fc on the features."""
    return i.product(i.site("fc.in"), "fc.weight")


def hidden(i: Inputs, _: str) -> Real:
    """fc.out at step 0, the carry of the row above later."""
    if i.recorded.keys.step[i.at[0]] == 0:
        return i.site("fc.out")[:, i.channels]
    return i.site("carry", i.recorded.parents[i.at])[:, i.channels]


def embed(i: Inputs, _: str) -> Real:
    """Embedding of the token fed."""
    name = "embed_tokens.weight"
    if name not in i.weights:
        raise NotReplayedError(f"the checkpoint has no {name}")
    tokens = i.recorded.keys.token_id[i.at].astype(np.int64)
    rows, width = i.weights.shape(name)
    if i.channels.max(initial=-1) >= width:
        raise NotReplayedError(f"{name} is {width} wide, which is less than what was recorded")
    i.present &= tokens < rows
    found = i.weights.rows(name, np.minimum(tokens, rows - 1))
    return found.astype(i.recorded.dtype)[:, i.channels]


def embed_norm(i: Inputs, at: str) -> Real:
    """Embedding, normed."""
    return i.norm(i.site("embed"), f"layers.{at[6:]}.input_layernorm.weight")[:, i.channels]


def hidden_norm(i: Inputs, at: str) -> Real:
    """Hidden state, normed."""
    if at == "layer.0":
        return i.norm(i.site("hidden"), "layers.0.hidden_norm.weight")[:, i.channels]
    # speculators' later layers are plain decoder layers, SGLang gives them a hidden_norm
    number = int(at[6:])
    known = f"layers.{number}.input_layernorm.weight"
    name = known if known in i.weights else f"layers.{number}.hidden_norm.weight"
    return i.norm(i.site(f"layer.{number - 1}.out"), name)[:, i.channels]


def entering(i: Inputs, at: str) -> Real:
    """What attention is given: the normed stream, in the first layer behind the normed embedding."""
    parts = [i.site(f"{at}.hidden_norm")]
    if at == "layer.0":
        parts.insert(0, i.site(f"{at}.embed_norm"))
    return np.concatenate(parts, axis=1)


def _projection(name: str) -> Callable[[Inputs, str], Real]:
    def step(i: Inputs, at: str) -> Real:
        base = f"layers.{at[6:]}.self_attn.{name}"
        norm = f"{base}_norm.weight"
        if norm not in i.weights:
            return i.product(entering(i, at), f"{base}_proj.weight")
        # Qwen3: each head normed; needs whole heads
        every = i.channels
        i.channels = np.arange(i.weights.shape(f"{base}_proj.weight")[0])
        out = i.product(entering(i, at), f"{base}_proj.weight")
        heads = i.norm(out.reshape(len(out), -1, i.form.head_dim), norm)
        i.channels = every
        return heads.reshape(out.shape)[:, every]

    return step


def _rotation(name: str) -> Callable[[Inputs, str], Real]:
    def step(i: Inputs, at: str) -> Real:
        positions = i.recorded.keys.position[i.at]
        return rotate(i.site(f"{at}.attn.{name}"), positions, i.form.head_dim, i.form.rope)[:, i.channels]

    return step


def context(i: Inputs, at: str) -> Real:
    """Attention over the recorded keys and values."""
    q = i.site(f"{at}.attn.q_rope")
    if q.shape[1] != i.form.heads * i.form.head_dim or i.recorded.width(f"{at}.attn.v") != (
        i.form.kv_heads * i.form.head_dim
    ):
        raise NotReplayedError(f"queries of width {q.shape[1]} do not make {i.form.heads} heads as trained")
    i.view.layer = at
    queries = q.reshape(len(q), i.form.heads, i.form.head_dim)
    out, done = attend(
        queries, i.recorded.keys.take(i.at), i.view, kv_heads=i.form.kv_heads, scale=i.form.on_scores
    )  # fmt: skip
    i.present &= done
    return out.reshape(len(out), -1)[:, i.channels]


def attn_out(i: Inputs, at: str) -> Real:
    """Output projection of attention."""
    return i.product(i.site(f"{at}.attn.context"), f"layers.{at[6:]}.self_attn.o_proj.weight")


def residual(i: Inputs, at: str) -> Real:
    """Stream after attention was added to the hidden state, or to the normed one."""
    before = "hidden" if at == "layer.0" else f"layer.{int(at[6:]) - 1}.out"
    if at == "layer.0" and i.form.norm_before_residual:
        before = f"{at}.hidden_norm"
    return (i.site(before) + i.site(f"{at}.attn.out"))[:, i.channels]


def mlp_norm(i: Inputs, at: str) -> Real:
    """Stream, normed."""
    name = f"layers.{at[6:]}.post_attention_layernorm.weight"
    return i.norm(i.site(f"{at}.attn.residual"), name)[:, i.channels]


def gate(i: Inputs, at: str) -> Real:
    """Gate projection."""
    return i.product(i.site(f"{at}.mlp.norm"), f"layers.{at[6:]}.mlp.gate_proj.weight")


def up(i: Inputs, at: str) -> Real:
    """Up projection."""
    return i.product(i.site(f"{at}.mlp.norm"), f"layers.{at[6:]}.mlp.up_proj.weight")


def act(i: Inputs, at: str) -> Real:
    """silu(gate) * up."""
    return (silu(i.site(f"{at}.mlp.gate")) * i.site(f"{at}.mlp.up"))[:, i.channels]


def mlp_out(i: Inputs, at: str) -> Real:
    """Down projection."""
    return i.product(i.site(f"{at}.mlp.act"), f"layers.{at[6:]}.mlp.down_proj.weight")


def layer_out(i: Inputs, at: str) -> Real:
    """Stream after the layer."""
    return (i.site(f"{at}.attn.residual") + i.site(f"{at}.mlp.out"))[:, i.channels]


def final_norm(i: Inputs, last: str) -> Real:
    """What the head reads: the stream behind the final norm, or the stream itself."""
    if not i.form.head_norm:
        return i.site(f"{last}.out")[:, i.channels]
    return i.norm(i.site(f"{last}.out"), "norm.weight")[:, i.channels]


def carry(i: Inputs, last: str) -> Real:
    """What the next step starts from."""
    return i.site("norm" if i.form.norm_output else f"{last}.out")[:, i.channels]


def logits(i: Inputs, _: str) -> Real:
    """Scores of the sampled draft ids."""
    return i.product(i.site("norm"), "lm_head.weight")


#: steps by the last part of the site's name
STEPS: dict[str, Callable[[Inputs, str], Real]] = {
    "fc.in": fc_in,
    "fc.out": fc_out,
    "hidden": hidden,
    "embed": embed,
    "embed_norm": embed_norm,
    "hidden_norm": hidden_norm,
    "attn.q": _projection("q"),
    "attn.k": _projection("k"),
    "attn.v": _projection("v"),
    "attn.q_rope": _rotation("q"),
    "attn.k_rope": _rotation("k"),
    "attn.context": context,
    "attn.out": attn_out,
    "attn.residual": residual,
    "mlp.norm": mlp_norm,
    "mlp.gate": gate,
    "mlp.up": up,
    "mlp.act": act,
    "mlp.out": mlp_out,
    "out": layer_out,
    "norm": final_norm,
    "carry": carry,
    "logits": logits,
}
