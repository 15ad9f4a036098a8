"""Where the sites of the draft forward are found in speculators' `Eagle3DraftModel`.

``attn.q`` and ``attn.k`` are what enters the rotation. That is the projection's output for Llama; Qwen3 norms
each head in between (q_norm, k_norm), and what is rotated is the normed one.
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Given, Tap, after, before
from eagle_trace_speculators.releases import RELEASES
from eagle_trace_training import sites
from eagle_trace_training.host import Receive


def taps(model: Any) -> list[Tap]:
    """Every site of a draft that a module shows; `SiteTap` adds what is rotated."""
    # the next step receives the normed state, or the state itself
    normed = model.config.norm_output
    layers = range(len(model.layers))
    return [
        *sites.ENTRANCE,
        before("rotary_emb", "position", 1),
        Tap("layers.0", "before", "hidden", _second_half),
        *([] if normed else [after(f"layers.{layers[-1]}", "carry")]),
        *(tap for n in layers for tap in sites.layer_taps(f"layers.{n}", n)),
        after("norm", "norm"),
        *([after("norm", "carry")] if normed else []),
        after("lm_head", "logits"),
    ]


def _second_half(given: Given) -> Any:
    """The first layer is given the embedding and the hidden state side by side."""
    both = given.args[0]
    return both[..., both.shape[-1] // 2 :]


class SiteTap(sites.SiteTap):
    """The sites of an `Eagle3DraftModel`; see `eagle_trace_training.sites.SiteTap`."""

    def __init__(self, hooks: Hooks, model: Any, receive: Receive) -> None:
        super().__init__(hooks, model, taps(model), receive, RELEASES)
        self._layer = 0
        for n, layer in enumerate(model.layers):
            hooks.before(layer.self_attn, lambda *_, n=n: self._enter(n))
        for module in {sys.modules[type(layer.self_attn).__module__] for layer in model.layers}:
            hooks.wrap(
                module, "apply_rotary_pos_emb", lambda turned, given, _: self._take_rotated(self._layer, given, turned)
            )

    def _enter(self, layer: int) -> None:
        self._layer = layer
