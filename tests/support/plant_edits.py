"""Edits of configs, tensors and features that the planted faults are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.numpy_target import Target, answers, read_tensors, rms
from tests.support.pairs import DRAFT
from tests.support.planted import Change, Edit


def put(*path: str, value: Any) -> Edit:
    """Set one entry of a nested dict."""

    def edit(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data.setdefault(key, {})
        data[path[-1]] = value

    return edit


def drop(*path: str) -> Edit:
    """Remove one entry of a nested dict."""

    def edit(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data.pop(path[-1], None)

    return edit


def rename(old: str, new: str) -> Edit:
    """Move one tensor to another name."""
    return lambda held: held.__setitem__(new, held.pop(old))


def fresh(name: str, scale: float = 0.02) -> Edit:
    """Random numbers in place of a tensor."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = np.random.default_rng(7).standard_normal(tensors[name].shape) * scale

    return edit


def layers(*ids: int) -> Callable[[Any], Any]:
    """Features of some target layers, by Hugging Face's numbering."""
    return lambda states: np.concatenate([states[n] for n in ids], axis=1)


def ids(*values: int) -> Edit:
    """Deployed layer ids (SGLang's numbering)."""
    return put("eagle_config", "eagle_aux_hidden_state_layer_ids", value=list(values))


def trained_ids(*values: int) -> Edit:
    """Trained layer ids."""
    return put("eagle_aux_hidden_state_layer_ids", value=list(values))


def offsets(change: Callable[[Any, Any], Any]) -> Edit:
    """A changed d2t, from (offsets, arange)."""

    def edit(held: dict[str, Any]) -> None:
        held["d2t"] = change(held["d2t"], np.arange(len(held["d2t"])))

    return edit


def ones_for(name: str, width: int) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        weight = 1 + 0.3 * np.random.default_rng(3).standard_normal(width)
        tensors[name] = weight.astype(np.float32)

    return edit


def after_final_norm(states: Any) -> Any:
    return rms(states, Target().tensors["model.norm.weight"], 1e-5)


def heads(name: str, order: list[int], size: int = 32) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        rows = tensors[name].reshape(-1, size, tensors[name].shape[1])
        tensors[name] = rows[order].reshape(tensors[name].shape)

    return edit


def half(name: str) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][:, tensors[name].shape[1] // 2 :] = 0

    return edit


def own_embedding(tensors: dict[str, Any]) -> None:
    held = tensors["embed_tokens.weight"]
    noise = np.random.default_rng(4).standard_normal(held.shape) * 0.02
    tensors["embed_tokens.weight"] = (held.astype(np.float64) + noise).astype(held.dtype)


def swap(a: str, b: str) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return edit


def embedding_head(rows: int) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"][:rows]

    return edit


def each_norm(features: Any, tensors: Any, eps: float) -> Any:
    width = features.shape[1] // 3
    parts = [rms(features[:, n * width : (n + 1) * width], tensors[f"fc_norm.{n}.weight"], eps) for n in range(3)]
    return np.concatenate(parts, axis=1)


def several(*edits: Edit) -> Edit:
    def edit(data: Any) -> None:
        for one in edits:
            one(data)

    return edit


def nan_at(site: str) -> Callable[[str, Any], Any]:
    def damage(name: str, values: Any) -> Any:
        if name == site:
            values = values.copy()
            values[0, 0] = np.nan
        return values

    return damage


def without(name: str) -> Callable[[str], bool]:
    """Shipped: all but one parameter."""
    return lambda one: one != name


def with_bos() -> list[tuple[int, ...]]:
    return [(256, *tokens) for tokens in answers()]


def deployed_offsets(change: Callable[[Any, Any], Any]) -> Change:
    held = read_tensors(DRAFT)["d2t"]
    return {"d2t": change(held, np.arange(len(held)))}


HIDDEN_NORM, HEAD = "layers.0.hidden_norm.weight", "lm_head.weight"
Q, K, V, OUT = (f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
