"""Where the sites of the draft forward are found in SpecForge's `LlamaForCausalLMEagle3`.

The carry of step s is read as what the loop begins step s + 1 with, and `norm` as what the head is given: both hold
whatever `norm_output` means in a release, and what it means is seen there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from specforge.core.eagle3_adapters import SdpaLikeAdapter

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
#: what SpecForge's rotary module keeps of a scaling
SCALING = ("scaling_factor", "low_freq_factor", "high_freq_factor", "orig_max_position")


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
            SGLang), `head_norm`, whether the head's input is, and `rope_rounded`, if the rotary tables were built of
            rounded numbers.

    Raises:
        HostError: the draft lacks a place that this recorder knows; or, in a forward, its layer is given another carry
            than the loop began the step with.
    """

    def __init__(self, hooks: Hooks, draft: Any, receive: Receive) -> None:
        self._receive = receive
        self._step = -1
        self._out: Any = None
        self._carry: Any = None
        self.seen: dict[str, Any] = {}
        # each step embeds its tokens first
        hooks.before(draft.embed_tokens, lambda *_: self._begin_step())
        if missing := hang(hooks, draft, TAPS, self._take):
            raise HostError(
                f"this version of specforge has no {', '.join(sorted(set(missing.values())))} in its draft, which the "
                "one this recorder was written for (0.2.0) has: install that one, or report it"
            )
        self._rotary: Any = draft.midlayer.self_attn.rotary_emb
        hooks.wrap(
            SdpaLikeAdapter,
            "step_view",
            # one class for all models of the process
            lambda state, args, given: self._hand_on(state, given) if args[0].m.draft_model is draft else None,
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
            self._out = None if {"norm_output", "head_norm"} <= self.seen.keys() else tensor
        elif site == "norm" and "head_norm" not in self.seen:
            self.seen["head_norm"] = not _same(tensor, self._out)
        elif site == "hidden" and self._carry is not None:
            carry, self._carry = self._carry, None
            if not _same(tensor, carry):
                raise HostError(
                    "this version of specforge does not give its layer what its loop carries to the next step, as the "
                    "one this recorder was written for (0.2.0) does: install that one, or report it"
                )
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor)

    def _hand_on(self, state: Any, given: dict[str, Any]) -> None:
        """A step of the loop begins; the draft has not seen anything of it."""
        if given["idx"] == 0 or self._step < 0:
            return
        carry = state.hidden_states.detach()
        if "norm_output" not in self.seen:
            self.seen["norm_output"] = not _same(carry, self._out)
            self._carry = carry
        self._take("carry", carry)

    def _rotated(self, result: Any, args: tuple[Any, ...]) -> None:
        if self._rotary is not None:
            if rounded := rounded_tables(self._rotary, args[2]):
                self.seen["rope_rounded"] = rounded
            self._rotary = None
        for name, tensor in (("q", args[0]), ("k", args[1]), ("q_rope", result[0]), ("k_rope", result[1])):
            # [B, heads, T, head size] to [B, T, heads * head size]
            self._take(f"layer.0.attn.{name}", tensor.transpose(1, 2).flatten(2))
        self._take("position", args[4].expand(args[0].shape[0], -1))


def rounded_tables(rotary: Any, cos: Any) -> str:
    """What of a rotary table was rounded to bfloat16 before it was computed, as `Rope.rounded` has it in the analysis.

    A model in bfloat16 has rounded frequencies, but the table that was built before; the first sequence that it is too
    short for has it built anew, from them.

    Args:
        rotary: the module, with its frequencies.
        cos: the table that it gave, [1, 1, rows, size].
    """
    if type(rotary).__name__ != "LlamaRotaryEmbedding":
        return ""
    scaling = {name: getattr(rotary, name, None) for name in SCALING}
    exact = type(rotary)(rotary.dim, max_position_embeddings=1, base=rotary.base, **scaling).inv_freq.to(cos.device)
    rounded, rows = exact.bfloat16(), cos.shape[-2]
    place = torch.arange(rows, device=cos.device)
    angles = {
        "": place.float()[:, None] * exact,
        "frequencies": place.float()[:, None] * rounded.float(),
        "angles": (place.bfloat16()[:, None] * rounded).float(),
    }
    table = cos.detach().float().reshape(rows, -1)[:, : len(exact)]
    error = {name: float((table - angle.cos()).square().sum()) for name, angle in angles.items()}
    best = min(error, key=error.__getitem__)
    # where too few rows tell them apart, nothing is rounded
    return best if error[best] < error[""] / 4 else ""


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or equal (as a copy is)."""
    return one.data_ptr() == other.data_ptr() or bool((one == other).all())
