"""Where the sites of the draft forward are found in SpecForge's `LlamaForCausalLMEagle3`.

The carry of step s is read as what the loop begins step s + 1 with, and `norm` as what the head is given: both hold
whatever `norm_output` means in a release, and what it means is seen there.
"""

from __future__ import annotations

import sys
from typing import Any

from specforge.core.eagle3_adapters import SdpaLikeAdapter

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import after, before
from eagle_trace_specforge.releases import RELEASES
from eagle_trace_training import sites
from eagle_trace_training.host import Receive
from eagle_trace_training.numerics import rounded_tables

TAPS = (
    *sites.ENTRANCE,
    before("midlayer", "hidden", name="hidden_states"),
    *sites.layer_taps("midlayer"),
    before("lm_head", "norm"),
    after("lm_head", "logits"),
)
OUT = "layer.0.out"
#: what SpecForge's rotary module keeps of a scaling
SCALING = ("scaling_factor", "low_freq_factor", "high_freq_factor", "orig_max_position")


class SiteTap(sites.SiteTap):
    """The sites of a `LlamaForCausalLMEagle3`; see `eagle_trace_training.sites.SiteTap`.

    The loss's kernel writes the gradient into the logits. A forward shows the carry of all its steps but the last.

    Attributes:
        seen: what was seen of the first two steps: `norm_output`, whether the carry is normed (as the flag means in
            SGLang), `head_norm`, whether the head's input is, and `rope_rounded`, if the rotary tables were built of
            rounded numbers.

    Raises:
        HostError: the draft lacks a place that this recorder knows; or, in a forward, its layer is given another carry
            than the loop began the step with.
    """

    def __init__(self, hooks: Hooks, draft: Any, receive: Receive) -> None:
        super().__init__(hooks, draft, TAPS, receive, RELEASES)
        self._out: Any = None
        self._carry: Any = None
        self._rotary: Any = draft.midlayer.self_attn.rotary_emb
        hooks.wrap(
            SdpaLikeAdapter,
            "step_view",
            # one class for all models of the process
            lambda state, args, given: self._hand_on(state, given) if args[0].m.draft_model is draft else None,
        )
        rotation = sys.modules[type(draft.midlayer.self_attn).__module__]
        hooks.wrap(rotation, "apply_rotary_pos_emb", lambda turned, given, _: self._rotated(turned, given))

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
                raise RELEASES.other("does not give its layer what its loop carries to the next step", "does")
        super()._take(site, tensor)

    def _hand_on(self, state: Any, given: dict[str, Any]) -> None:
        """A step of the loop begins; the draft has not seen anything of it."""
        if given["idx"] == 0 or self._step < 0:
            return
        carry = state.hidden_states.detach()
        if "norm_output" not in self.seen:
            self.seen["norm_output"] = not _same(carry, self._out)
            self._carry = carry
        self._take("carry", carry)

    def _rotated(self, turned: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if self._rotary is not None:
            if rounded := _rounded(self._rotary, given[2]):
                self.seen["rope_rounded"] = rounded
            self._rotary = None
        self._take_rotated(0, given, turned)
        self._take("position", given[4].expand(given[0].shape[0], -1))


def _rounded(rotary: Any, cos: Any) -> str:
    """See `rounded_tables`; of the plain rotary module alone."""
    if type(rotary).__name__ != "LlamaRotaryEmbedding":
        return ""
    scaling = {name: getattr(rotary, name, None) for name in SCALING}
    exact = type(rotary)(rotary.dim, max_position_embeddings=1, base=rotary.base, **scaling).inv_freq
    return rounded_tables(exact, cos)


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or equal (as a copy is)."""
    return one.data_ptr() == other.data_ptr() or bool((one == other).all())
