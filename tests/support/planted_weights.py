"""Weights that are there, loaded, and not the trained ones: each kind, planted in the deployed checkpoint."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.support.plant_edits import HIDDEN_NORM, OUT, K, Q, V, heads, put, several, swap
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


def cases() -> list[tuple[Planted, str, str | None]]:
    """Each with words that its evidence or its fix must have, and those it must have where the deployed folder is gone.

    More kinds, tensor by tensor and without a pair of traces, are in `tests/unit/analysis/checkpoint/test_kinds.py`.
    """

    def differ(
        name: str, site: str, edit: Edit, words: str, gone: str | None = None
    ) -> tuple[Planted, str, str | None]:
        return Planted(name, "weights-differ", site, **both(edit)), words, gone

    return [
        differ("another-state", "fc.out", another_state, "they are of another state of the training"),
        differ("int8", "layer.0.attn.q", quantised(127, Q, K, V, OUT, GATE, UP, DOWN), "int8 with one scale per row"),
        # the rounding of what is stored is in the figure
        differ("scaled", "layer.0.mlp.out", change(DOWN, lambda x: 1.005 * x), "divide it by 1.00", "acts as 1.00"),
        differ("gate-and-up", "layer.0.mlp.gate", swap(GATE, UP), f"exchange {GATE} and {UP}", "are exchanged"),
        differ(
            "transposed", "layer.0.attn.out", change(OUT, lambda x: x.T), "transpose it", "is the trained one transp"
        ),
        differ("features-moved", "fc.out", columns(FC, [1, 2, 0]), "in the order 1, 2, 0", "in the order 1, 2, 0"),
    ]


def two_at_once() -> list[tuple[Planted, list[str]]]:
    """Two faults that meet in one step, or in one kind of step."""
    eps = put("rms_norm_eps", value=1e-2)
    norms = (HIDDEN_NORM, EMBED_NORM, NORM, "layers.0.post_attention_layernorm.weight")
    scale = several(*(change(name, lambda x: 1.2 * x) for name in norms))
    rope = several(put("rope_parameters", "rope_theta", value=500.0), put("partial_rotary_factor", value=0.5))
    return [
        (
            Planted("eps-and-norms", None, "layer.0.embed_norm", config=eps, serve={"eps": 1e-2}, **both(scale)),
            ["norm-eps", "weights-differ"],
        ),
        (
            Planted("theta-and-share", None, "layer.0.attn.q_rope", config=rope, serve={"theta": 500.0, "share": 0.5}),
            ["rope-layout", "rope-theta"],
        ),
        (
            Planted("gate-and-window", None, "layer.0.attn.context", serve={"window": 24}, **both(swap(GATE, UP))),
            ["sliding-window", "weights-differ"],
        ),
    ]


# ---- heads, in a draft of more channels than are sampled ----------------------------------------------------------

WIDE_HEADS, WIDE_GROUPS, SIZE = 40, 20, 32


def wide(held: dict[str, Any]) -> None:
    """Projections of 40 query heads and 20 key and value heads: 1,280 and 640 channels."""
    draw = np.random.default_rng(21)
    for name, shape in ((Q, (WIDE_HEADS * SIZE, 256)), (K, (WIDE_GROUPS * SIZE, 256)), (V, (WIDE_GROUPS * SIZE, 256)),
                        (OUT, (128, WIDE_HEADS * SIZE))):  # fmt: skip
        values = (0.05 * draw.standard_normal(shape)).astype(ml_dtypes.bfloat16)
        held[name] = values.astype(held[name].dtype)


def fused_by_groups(held: dict[str, Any]) -> None:
    """q, k and v as they come out if one fused tensor, group by group, is split as if all queries came first."""
    ends = np.cumsum([len(held[name]) for name in (Q, K, V)])
    groups = [np.split(held[name], WIDE_GROUPS) for name in (Q, K, V)]
    whole = np.concatenate([part for one in zip(*groups, strict=True) for part in one])
    held[Q], held[K], held[V] = np.split(whole, ends[:-1])


def wide_heads() -> list[tuple[Planted, str]]:
    """Heads at other places in the wide draft, each with words that the evidence must have."""
    shape = {"num_attention_heads": WIDE_HEADS, "num_key_value_heads": WIDE_GROUPS}

    def planted(name: str, site: str, edit: Edit, words: str) -> tuple[Planted, str]:
        flat = several(*(put(key, value=value) for key, value in shape.items()))
        nested = several(*(put("transformer_layer_config", key, value=value) for key, value in shape.items()))
        case = Planted(name, "qkv-order", site, config=flat, trained=nested, trained_stored=wide,
                       **both(several(wide, edit)))  # fmt: skip
        return case, words

    order = list(range(WIDE_HEADS))
    order[3], order[31] = 31, 3
    return [
        planted("two-query-heads", "layer.0.attn.q", heads(Q, order), "of q, heads 3 and 31 exchanged"),
        planted("fused-by-groups", "layer.0.attn.q", fused_by_groups, "fused tensor of 20 groups"),
    ]
