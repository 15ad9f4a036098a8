"""Where the sites of the draft forward are found in SpecForge's `LlamaForCausalLMEagle3`.

The carry of step s is read as what step s + 1 is given, and `norm` as what the head is given: both hold whatever
`norm_output` means in a release, and what it means is seen there.
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import after, before, hang
from eagle_trace_training.host import Receive

TAPS = (
    before("fc", "fc.in"),
    after("fc", "fc.out"),
    before("embed_tokens", "token"),
    after("embed_tokens", "embed"),
    before("midlayer", "hidden", name="hidden_states"),
    after("midlayer.input_layernorm", "layer.0.embed_norm"),
    after("midlayer.hidden_norm", "layer.0.hidden_norm"),
    after("midlayer.self_attn.v_proj", "layer.0.attn.v"),
    before("midlayer.self_attn.o_proj", "layer.0.attn.context"),
    after("midlayer.self_attn.o_proj", "layer.0.attn.out"),
    before("midlayer.post_attention_layernorm", "layer.0.attn.residual"),
    after("midlayer.post_attention_layernorm", "layer.0.mlp.norm"),
    after("midlayer.mlp.gate_proj", "layer.0.mlp.gate"),
    after("midlayer.mlp.up_proj", "layer.0.mlp.up"),
    before("midlayer.mlp.down_proj", "layer.0.mlp.act"),
    after("midlayer.mlp.down_proj", "layer.0.mlp.out"),
    after("midlayer", "layer.0.out"),
    before("lm_head", "norm"),
    after("lm_head", "logits"),
)
OUT = "layer.0.out"


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

    Raises:
        HostError: the draft lacks a place that this recorder knows.
    """

    def __init__(self, hooks: Hooks, draft: Any, receive: Receive) -> None:
        self._receive = receive
        self._step = -1
        self._out: Any = None
        self.seen: dict[str, Any] = {}
        # each step embeds its tokens first
        hooks.before(draft.embed_tokens, lambda *_: self._begin_step())
        if missing := hang(hooks, draft, TAPS, self._take):
            raise HostError(
                f"this version of specforge has no {', '.join(sorted(set(missing.values())))} in its draft, which the "
                "one this recorder was written for (0.2.0) has: install that one, or report it"
            )
        rotation = sys.modules[type(draft.midlayer.self_attn).__module__]
        hooks.wrap(rotation, "apply_rotary_pos_emb", lambda result, args, _kwargs: self._rotated(result, args))

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _begin_step(self) -> None:
        self._step += 1

    def _take(self, site: str, tensor: Any) -> None:
        tensor = tensor.detach()
        if site == OUT:
            # kept no longer than it takes to see what becomes of it
            self._out = tensor if len(self.seen) < 2 else None
        elif site == "norm" and "head_norm" not in self.seen:
            self.seen["head_norm"] = not _same(tensor, self._out)
        elif site == "hidden" and self._step > 0:
            if "norm_output" not in self.seen:
                self.seen["norm_output"] = not _same(tensor, self._out)
            self._receive(self._step - 1, "carry", tensor)
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor)

    def _rotated(self, result: Any, args: tuple[Any, ...]) -> None:
        for name, tensor in (("q", args[0]), ("k", args[1]), ("q_rope", result[0]), ("k_rope", result[1])):
            # [B, heads, T, head size] to [B, T, heads * head size]
            self._take(f"layer.0.attn.{name}", tensor.transpose(1, 2).flatten(2))
        self._take("position", args[4].expand(args[0].shape[0], -1))


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or equal (as a copy is)."""
    return one.data_ptr() == other.data_ptr() or bool((one == other).all())
