"""Where the sites of the draft forward are found in speculators' `Eagle3DraftModel`.

``attn.q`` and ``attn.k`` are what enters the rotation. That is the projection's output for Llama; Qwen3 norms
each head in between (q_norm, k_norm), and what is rotated is the normed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Given, Tap, after, before, hang

#: receives (step, site, tensor [1, T, W] or ids [1, T])
Receive = Callable[[int, str, Any], None]


def taps(model: Any) -> list[Tap]:
    """Every site of a draft that a module shows; `SiteTap` adds what is rotated."""
    # the next step receives the normed state, or the state itself
    normed = model.config.norm_output
    state = [] if normed else [after(f"layers.{len(model.layers) - 1}", "carry")]
    return [
        before("fc", "fc.in", name="hidden_states"),
        after("fc", "fc.out"),
        before("embed_tokens", "token"),
        after("embed_tokens", "embed"),
        before("rotary_emb", "position", 1),
        Tap("layers.0", "before", "hidden", _second_half),
        *state,
        *(tap for n in range(len(model.layers)) for tap in _layer(n)),
        after("norm", "norm"),
        *([after("norm", "carry")] if normed else []),
        after("lm_head", "logits"),
    ]


def _second_half(given: Given) -> Any:
    """The first layer is given the embedding and the hidden state side by side."""
    both = given.args[0]
    return both[..., both.shape[-1] // 2 :]


def _layer(n: int) -> Iterator[Tap]:
    at, layer = f"layer.{n}", f"layers.{n}"
    if n == 0:
        yield after(f"{layer}.input_layernorm", f"{at}.embed_norm")
        yield after(f"{layer}.hidden_norm", f"{at}.hidden_norm")
    else:
        yield after(f"{layer}.input_layernorm", f"{at}.hidden_norm")
    yield after(f"{layer}.self_attn.v_proj", f"{at}.attn.v")
    yield before(f"{layer}.self_attn.o_proj", f"{at}.attn.context", name="hidden_states")
    yield after(f"{layer}.self_attn.o_proj", f"{at}.attn.out")
    yield before(f"{layer}.post_attention_layernorm", f"{at}.attn.residual", name="hidden_states")
    yield after(f"{layer}.post_attention_layernorm", f"{at}.mlp.norm")
    yield after(f"{layer}.mlp.gate_proj", f"{at}.mlp.gate")
    yield after(f"{layer}.mlp.up_proj", f"{at}.mlp.up")
    yield before(f"{layer}.mlp.down_proj", f"{at}.mlp.act", name="hidden_states")
    yield after(f"{layer}.mlp.down_proj", f"{at}.mlp.out")
    yield after(layer, f"{at}.out")


class SiteTap:
    """Hangs `receive` into every site of a draft and keeps count of the step.

    The receiver gets the host's own tensors, detached, and must copy what it keeps. Call `restart` before each
    forward.

    Args:
        hooks: takes the hooks off again.
        model: an `Eagle3DraftModel`.
        receive: called at every site of every step.

    Raises:
        HostError: the model lacks a place that this recorder knows.
    """

    def __init__(self, hooks: Hooks, model: Any, receive: Receive) -> None:
        self._receive = receive
        self._step = -1
        self._layer = 0
        # each step embeds its tokens first
        hooks.before(model.embed_tokens, lambda *_: self._begin_step())
        if missing := hang(hooks, model, taps(model), self._take):
            raise HostError(
                f"this version of speculators has no {', '.join(sorted(set(missing.values())))} in its draft, which "
                "the one this recorder was written for (0.9.0) has: install that one, or report it"
            )
        for n, layer in enumerate(model.layers):
            hooks.before(layer.self_attn, lambda *_, n=n: self._enter(n))
        for module in {sys.modules[type(layer.self_attn).__module__] for layer in model.layers}:
            hooks.wrap(module, "apply_rotary_pos_emb", self._rotated)

    @property
    def seen(self) -> dict[str, Any]:
        """Nothing: what a config of speculators says is what is computed."""
        return {}

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _begin_step(self) -> None:
        self._step += 1

    def _enter(self, layer: int) -> None:
        self._layer = layer

    def _take(self, site: str, tensor: Any) -> None:
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor.detach())

    def _rotated(self, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        at = f"layer.{self._layer}.attn"
        for name, tensor in (("q", args[0]), ("k", args[1]), ("q_rope", result[0]), ("k_rope", result[1])):
            # [1, heads, T, head size] to [1, T, heads * head size]
            self._take(f"{at}.{name}", tensor.transpose(1, 2).flatten(2))
