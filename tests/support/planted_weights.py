"""Weights that are there, loaded, and not the trained ones: each kind, planted in the deployed checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.plant_edits import HEAD, HIDDEN_NORM, OUT, K, Q, V, heads, put, several, swap
from tests.support.planted import Edit, Planted

GATE, UP, DOWN = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
FC, NORM, EMBED_NORM = "fc.weight", "norm.weight", "layers.0.input_layernorm.weight"


def both(edit: Edit) -> dict[str, Edit]:
    """An edit of what is stored and of what is used."""
    return {"stored": edit, "serve_tensors": edit}


def change(name: str, how: Any) -> Edit:
    """One tensor put through a function, and rounded to bfloat16, in which the demo's draft is stored."""

    def edit(held: dict[str, Any]) -> None:
        held[name] = how(held[name].astype(np.float64)).astype(ml_dtypes.bfloat16).astype(held[name].dtype)

    return edit


def scaled_row(name: str, row: int, factor: float) -> Edit:
    def how(x: Any) -> Any:
        x = x.copy()
        x[row] *= factor
        return x

    return change(name, how)


def rounded(x: Any, levels: int, *, axis: int | None = None) -> Any:
    """To the nearest of `levels` steps of the largest element, of the tensor or of each row."""
    step = np.abs(x).max(axis=axis, keepdims=axis is not None) / levels
    return np.round(x / step) * step


def another_state(held: dict[str, Any]) -> None:
    """Every matrix and norm a little further, as one more epoch leaves them."""
    draw = np.random.default_rng(11)
    for name in sorted(held):
        if held[name].dtype.kind not in "iub" and name not in ("embed_tokens.weight", "t2d"):
            change(name, lambda x: x + 0.03 * np.sqrt((x * x).mean()) * draw.standard_normal(x.shape))(held)


def quantised(levels: int, *names: str) -> Edit:
    return several(*(change(name, lambda x: rounded(x, levels, axis=1)) for name in names))


def columns(name: str, order: list[int]) -> Edit:
    return change(name, lambda x: np.concatenate([np.split(x, len(order), axis=1)[k] for k in order], axis=1))


def merged(name: str, rank: int) -> Edit:
    def how(x: Any) -> Any:
        draw = np.random.default_rng(12)
        a, b = draw.standard_normal((x.shape[0], rank)), draw.standard_normal((rank, x.shape[1]))
        return x + 0.2 * x.std() * a @ b / rank

    return change(name, how)


def cases() -> list[tuple[Planted, str]]:
    """Each with words that its evidence or its fix must have."""

    def differ(name: str, site: str, edit: Edit, words: str) -> tuple[Planted, str]:
        return Planted(name, "weights-differ", site, **both(edit)), words

    return [
        differ("another-state", "fc.out", another_state, "of another state of the training"),
        differ("int8", "layer.0.attn.q", quantised(127, Q, K, V, OUT, GATE, UP, DOWN), "int8 with one scale per row"),
        differ("int4", "layer.0.mlp.out", quantised(7, DOWN), "grid of int4 with one scale per row"),
        differ("scaled", "layer.0.mlp.out", change(DOWN, lambda x: 1.005 * x), "divide it by 1.005"),
        differ("negated", "layer.0.mlp.out", change(DOWN, lambda x: -x), "negate it"),
        differ("norm-less-one", "layer.0.hidden_norm", change(HIDDEN_NORM, lambda x: x - 1), "as for norms that scale"),
        differ("one-channel", "layer.0.attn.out", scaled_row(OUT, 17, 1.02), "1.02 x the trained one in row 17 alone"),
        differ("gate-and-up-exchanged", "layer.0.mlp.gate", swap(GATE, UP), f"exchange {GATE} and {UP}"),
        differ("norms-exchanged", "layer.0.embed_norm", swap(HIDDEN_NORM, EMBED_NORM), "are exchanged"),
        differ("transposed", "layer.0.attn.out", change(OUT, lambda x: x.T), "transpose it"),
        differ("features-in-another-order", "fc.out", columns(FC, [1, 2, 0]), "in the order 1, 2, 0"),
        differ("head-rows-moved", "logits", change(HEAD, lambda x: x[::-1]), "store its rows in the order of d2t"),
        differ("merged-lora", "layer.0.mlp.gate", merged(GATE, 4), "a change of rank 4"),
        (Planted("heads", "qkv-order", "layer.0.attn.q", **both(heads(Q, [2, 1, 0, 3]))), "heads 0 and 2 exchanged"),
        (Planted("keys-with-values", "qkv-order", "layer.0.attn.k", **both(swap(K, V))), "k and v exchanged"),
    ]  # fmt: skip


def two_at_once() -> list[tuple[Planted, list[str]]]:
    """Two faults that meet in one step, or in one kind of step."""
    eps = put("rms_norm_eps", value=1e-2)
    scale = change(HIDDEN_NORM, lambda x: 1.2 * x)
    both_norms = several(scale, change(EMBED_NORM, lambda x: 1.2 * x), change(NORM, lambda x: 1.2 * x),
                         change("layers.0.post_attention_layernorm.weight", lambda x: 1.2 * x))  # fmt: skip
    eps_and = Planted("eps-and-one-norm", None, "layer.0.embed_norm", config=eps, serve={"eps": 1e-2}, **both(scale))
    rope = several(
        put("rope_parameters", "rope_theta", value=500.0), put("rope_parameters", "partial_rotary_factor", value=0.5)
    )
    return [
        (eps_and, ["norm-eps", "weights-differ"]),
        (replace(eps_and, name="eps-and-every-norm", **both(both_norms)), ["norm-eps", "weights-differ"]),
        (
            Planted("theta-and-share", None, "layer.0.attn.q_rope", config=rope, serve={"theta": 500.0, "share": 0.5}),
            ["rope-layout", "rope-theta"],
        ),
        (
            Planted("gate-and-window", None, "layer.0.attn.context", serve={"window": 24}, **both(swap(GATE, UP))),
            ["sliding-window", "weights-differ"],
        ),
    ]
