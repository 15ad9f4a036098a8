"""The demo target as a small llama in numpy, and the few operations that its draft shares with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.support.pairs import TARGET

F64 = NDArray[np.float64]
Tensors = dict[str, Any]
NEW_TOKENS = 20
TEXTS = ("The return statement ", "A class is a set of methods and ", "If no file is found, the error ")


def read_tensors(folder: Path) -> Tensors:
    """Tensors of a checkpoint, floats as float64."""
    held = load_file(folder / "model.safetensors")
    return {name: one if one.dtype.kind in "iub" else one.astype(np.float64) for name, one in held.items()}


def rms(x: F64, weight: F64, eps: float) -> F64:
    """RMSNorm."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def low(values: F64) -> F64:
    """Rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def turn(
    x: F64,
    positions: Sequence[int],
    size: int,
    theta: float,
    layout: str = "half",
    share: float = 1.0,
    rounded: str = "",
) -> F64:
    """Rotary embedding of [T, heads x size]; `layout` half or pairs, `share` of each head, `rounded` as in `Rope`."""
    rotated = int(size * share)
    frequency = theta ** (-np.arange(0, rotated, 2) / rotated)
    place = np.asarray(positions, dtype=np.float64)[:, None, None]
    angle = place * (low(frequency) if rounded else frequency)
    if rounded == "angles":
        angle = low(low(place) * low(frequency))
    heads = x.reshape(len(x), -1, size)
    turned = heads[..., :rotated].copy()
    pick = (
        (slice(0, None, 2), slice(1, None, 2))
        if layout == "pairs"
        else (slice(0, rotated // 2), slice(rotated // 2, None))
    )
    both = turned[..., pick[0]] + 1j * turned[..., pick[1]]
    both = both * np.exp(1j * angle)
    turned[..., pick[0]], turned[..., pick[1]] = both.real, both.imag
    return np.concatenate([turned, heads[..., rotated:]], axis=-1).reshape(x.shape)


def attend(q: F64, keys: F64, values: F64, heads: int, kv_heads: int) -> F64:
    """One query row over keys and values [N, kv_heads x size]."""
    size = len(q) // heads
    out = np.empty_like(q)
    for head in range(heads):
        group = head // (heads // kv_heads)
        k, v = (one[:, group * size : (group + 1) * size] for one in (keys, values))
        score = k @ q[head * size : (head + 1) * size] / np.sqrt(size)
        weight = np.exp(score - score.max())
        out[head * size : (head + 1) * size] = weight / weight.sum() @ v
    return out


def _causal(q: F64, k: F64, v: F64, heads: int, kv_heads: int) -> F64:
    size, out = q.shape[1] // heads, np.empty_like(q)
    for head in range(heads):
        mine, group = slice(head * size, (head + 1) * size), head // (heads // kv_heads)
        theirs = slice(group * size, (group + 1) * size)
        score = q[:, mine] @ k[:, theirs].T / np.sqrt(size)
        score = np.where(np.tri(len(q), dtype=np.bool_), score, -np.inf)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, mine] = weight / weight.sum(axis=1, keepdims=True) @ v[:, theirs]
    return out


class Target:
    """A small llama."""

    def __init__(self, folder: Path = TARGET) -> None:
        self.folder, self.config, self.tensors = (
            folder,
            json.loads((folder / "config.json").read_text()),
            read_tensors(folder),
        )
        self.layers = int(self.config["num_hidden_layers"])
        self._known: dict[tuple[int, ...], tuple[F64, F64]] = {}

    def hidden_states(self, tokens: Sequence[int]) -> F64:
        """Inputs of every layer, the last one's output, and the same after the final norm [L + 2, T, G]."""
        return self._both(tokens)[0]

    def branches(self, tokens: Sequence[int]) -> F64:
        """What the layer before added last to each of `hidden_states`, its MLP's output; NaN where there is none."""
        return self._both(tokens)[1]

    def _both(self, tokens: Sequence[int]) -> tuple[F64, F64]:
        if tuple(tokens) not in self._known:
            self._known[tuple(tokens)] = self._forward(tokens)
        return self._known[tuple(tokens)]

    def _forward(self, tokens: Sequence[int]) -> tuple[F64, F64]:
        config, eps = self.config, self.config["rms_norm_eps"]
        heads, kv_heads, size = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        x = self.tensors["model.embed_tokens.weight"][list(tokens)]
        states, none = [x], np.full_like(x, np.nan)
        branches = [none]
        places = list(range(len(tokens)))
        for n in range(self.layers):
            w = {k.split(f"layers.{n}.")[1]: t for k, t in self.tensors.items() if f"layers.{n}." in k}
            h = rms(x, w["input_layernorm.weight"], eps)
            q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
            q, k = (turn(one, places, size, config["rope_parameters"]["rope_theta"]) for one in (q, k))
            seen = _causal(q, k, v, heads, kv_heads)
            x = x + seen @ w["self_attn.o_proj.weight"].T
            h = rms(x, w["post_attention_layernorm.weight"], eps)
            gate = h @ w["mlp.gate_proj.weight"].T
            branches.append(
                (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
            )
            x = x + branches[-1]
            states.append(x)
        return np.stack([*states, rms(x, self.tensors["model.norm.weight"], eps)]), np.stack([*branches, none])

    @property
    def head(self) -> F64:
        """Output projection."""
        tied = self.tensors["model.embed_tokens.weight"]
        return self.tensors.get("lm_head.weight", tied)  # type: ignore[no-any-return]

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        """`tokens` and `count` more, greedily."""
        known = list(tokens)
        for _ in range(count):
            known.append(int((self.hidden_states(known)[-1, -1] @ self.head.T).argmax()))
        return known


@cache
def demo_target() -> Target:
    """The target that ships with eagle-trace."""
    return Target()


@cache
def answers() -> tuple[tuple[int, ...], ...]:
    """The prompts with the target's answers."""
    target = demo_target()
    return tuple(tuple(target.answer(list(text.encode()), NEW_TOKENS)) for text in TEXTS)
