"""Where the sites of the draft forward are found in SpecForge's `LlamaForCausalLMEagle3`.

The carry of step s is read as what step s + 1 is given, and `norm` as what the head is given: both hold whatever
`norm_output` means in a release, and what it means is seen there.
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace_training.host import Receive


class SiteTap:
    """Hangs `receive` into every site of a draft and keeps count of the step.

    The receiver gets the host's own tensors, detached, and must copy what it keeps: the loss's kernel writes the
    gradient into the logits. Call `restart` before each forward. A forward shows the carry of all its steps but the
    last.

    Args:
        hooks: takes the hooks off again.
        draft: a `LlamaForCausalLMEagle3`.
        receive: called at every site of every step.

    Attributes:
        seen: what was seen of the first two steps: `norm_output`, whether the carry is normed (as the flag means in
            SGLang), and `head_norm`, whether the head's input is.
    """

    def __init__(self, hooks: Hooks, draft: Any, receive: Receive) -> None:
        self._receive = receive
        self._hooks = hooks
        self._step = -1
        self._out: Any = None
        self.seen: dict[str, Any] = {}
        layer = draft.midlayer
        self._before(draft.fc, "fc.in")
        self._after(draft.fc, "fc.out")
        hooks.before(draft.embed_tokens, self._begin_step)
        self._after(draft.embed_tokens, "embed")
        hooks.before(layer, self._enter_layer)
        hooks.wrap(sys.modules[type(layer.self_attn).__module__], "apply_rotary_pos_emb", self._rotated)
        self._hang_layer(layer)
        hooks.after(layer, self._leave_layer)
        hooks.before(draft.lm_head, self._enter_head)
        self._after(draft.lm_head, "logits")

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _hang_layer(self, layer: Any) -> None:
        attention, mlp, at = layer.self_attn, layer.mlp, "layer.0"
        self._after(layer.input_layernorm, f"{at}.embed_norm")
        self._after(layer.hidden_norm, f"{at}.hidden_norm")
        self._after(attention.v_proj, f"{at}.attn.v")
        self._before(attention.o_proj, f"{at}.attn.context")
        self._after(attention.o_proj, f"{at}.attn.out")
        self._before(layer.post_attention_layernorm, f"{at}.attn.residual")
        self._after(layer.post_attention_layernorm, f"{at}.mlp.norm")
        self._after(mlp.gate_proj, f"{at}.mlp.gate")
        self._after(mlp.up_proj, f"{at}.mlp.up")
        self._before(mlp.down_proj, f"{at}.mlp.act")
        self._after(mlp.down_proj, f"{at}.mlp.out")

    def _take(self, site: str, tensor: Any, step: int | None = None) -> None:
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0) if step is None else step, site, tensor.detach())

    def _after(self, module: Any, site: str) -> None:
        self._hooks.after(module, lambda _module, _args, output: self._take(site, output))

    def _before(self, module: Any, site: str) -> None:
        self._hooks.before(module, lambda _module, args, _kwargs: self._take(site, args[0]))

    def _begin_step(self, _module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._step += 1
        self._take("token", args[0])

    def _enter_layer(self, _module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs["hidden_states"]
        if self._step:
            if "norm_output" not in self.seen:
                self.seen["norm_output"] = not _same(given, self._out)
            self._take("carry", given, self._step - 1)
        self._take("hidden", given)

    def _leave_layer(self, _module: Any, _args: tuple[Any, ...], output: Any) -> None:
        # kept no longer than it takes to see what becomes of it, and without what its gradient needs
        self._out = output.detach() if len(self.seen) < 2 else None
        self._take("layer.0.out", output)

    def _enter_head(self, _module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if "head_norm" not in self.seen:
            self.seen["head_norm"] = not _same(args[0], self._out)
        self._take("norm", args[0])

    def _rotated(self, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        for name, tensor in (("q", args[0]), ("k", args[1]), ("q_rope", result[0]), ("k_rope", result[1])):
            # [B, heads, T, head size] to [B, T, heads * head size]
            self._take(f"layer.0.attn.{name}", tensor.detach().transpose(1, 2).flatten(2))
        self._take("position", args[4].expand(args[0].shape[0], -1))


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or equal (a copy is)."""
    return one.data_ptr() == other.data_ptr() or bool((one.detach() == other).all())
