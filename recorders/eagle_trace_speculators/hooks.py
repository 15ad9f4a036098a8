"""Where the sites of the draft forward are found in speculators' `Eagle3DraftModel`.

``attn.q`` and ``attn.k`` are what enters the rotation. That is the projection's output for Llama; Qwen3 norms
each head in between (q_norm, k_norm), and what is rotated is the normed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from eagle_trace.recording.hooks import Hooks

#: receives (step, site, tensor [1, T, W] or ids [1, T])
Receive = Callable[[int, str, Any], None]


class SiteTap:
    """Hangs `receive` into every site of a draft and keeps count of the step.

    The receiver gets the host's own tensors, detached, and must copy what it keeps. Call `restart` before each
    forward.

    Args:
        hooks: takes the hooks off again.
        model: an `Eagle3DraftModel`.
        receive: called at every site of every step.
    """

    def __init__(self, hooks: Hooks, model: Any, receive: Receive) -> None:
        self._receive = receive
        self._hooks = hooks
        self._step = -1
        self._layer = 0
        self._hang_model(model)
        for n, layer in enumerate(model.layers):
            self._hang_layer(n, layer)
        for module in {sys.modules[type(layer.self_attn).__module__] for layer in model.layers}:
            hooks.wrap(module, "apply_rotary_pos_emb", self._rotated)

    @property
    def seen(self) -> dict[str, Any]:
        """Nothing: what a config of speculators says is what is computed."""
        return {}

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _take(self, site: str, tensor: Any) -> None:
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor.detach())

    def _after(self, module: Any, *sites: str) -> None:
        def take(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
            for site in sites:
                self._take(site, output)

        self._hooks.after(module, take)

    def _before(self, module: Any, site: str) -> None:
        self._hooks.before(
            module,
            lambda _module, args, kwargs: self._take(site, args[0] if args else kwargs["hidden_states"]),
        )

    def _hang_model(self, model: Any) -> None:
        def begin_step(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._step += 1
            self._take("token", args[0])

        def enter_layers(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            # the first layer is given the embedding and the hidden state side by side
            self._take("hidden", args[0].detach()[..., args[0].shape[-1] // 2 :])

        self._before(model.fc, "fc.in")
        self._after(model.fc, "fc.out")
        self._hooks.before(model.embed_tokens, begin_step)
        self._after(model.embed_tokens, "embed")
        self._hooks.before(model.rotary_emb, lambda _module, args, _kwargs: self._take("position", args[1]))
        self._hooks.before(model.layers[0], enter_layers)
        if model.config.norm_output:
            self._after(model.norm, "norm", "carry")
        else:
            self._after(model.layers[-1], "carry")
            self._after(model.norm, "norm")
        self._after(model.lm_head, "logits")

    def _hang_layer(self, n: int, layer: Any) -> None:
        at = f"layer.{n}"
        attention, mlp = layer.self_attn, layer.mlp

        def enter_attention(_module: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._layer = n

        if n == 0:
            self._after(layer.input_layernorm, f"{at}.embed_norm")
            self._after(layer.hidden_norm, f"{at}.hidden_norm")
        else:
            self._after(layer.input_layernorm, f"{at}.hidden_norm")
        self._hooks.before(attention, enter_attention)
        self._after(attention.v_proj, f"{at}.attn.v")
        self._before(attention.o_proj, f"{at}.attn.context")
        self._after(attention.o_proj, f"{at}.attn.out")
        self._before(layer.post_attention_layernorm, f"{at}.attn.residual")
        self._after(layer.post_attention_layernorm, f"{at}.mlp.norm")
        self._after(mlp.gate_proj, f"{at}.mlp.gate")
        self._after(mlp.up_proj, f"{at}.mlp.up")
        self._before(mlp.down_proj, f"{at}.mlp.act")
        self._after(mlp.down_proj, f"{at}.mlp.out")
        self._after(layer, f"{at}.out")

    def _rotated(self, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        at = f"layer.{self._layer}.attn"
        for name, tensor in (("q", args[0]), ("k", args[1]), ("q_rope", result[0]), ("k_rope", result[1])):
            # [1, heads, T, head size] to [1, T, heads * head size]
            self._take(f"{at}.{name}", tensor.detach().transpose(1, 2).flatten(2))
