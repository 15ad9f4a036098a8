"""Where the sites of the draft forward are found in `LatentDraft`."""

from __future__ import annotations

from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Tap, after, before, hang
from eagle_trace_reference.model import LatentDraft
from eagle_trace_training.host import Receive

_LAYER, _ATTENTION, _MLP = "layers.0", "layers.0.self_attn", "layers.0.mlp"
TAPS = (
    before("fc", "fc.in"),
    after("fc", "fc.out"),
    before("embed_tokens", "token"),
    after("embed_tokens", "embed"),
    before(_LAYER, "hidden", name="hidden"),
    after(f"{_LAYER}.input_layernorm", "layer.0.embed_norm"),
    after(f"{_LAYER}.hidden_norm", "layer.0.hidden_norm"),
    after(f"{_ATTENTION}.q_a_proj", "layer.0.attn.q_a"),
    after(f"{_ATTENTION}.kv_a_proj_with_mqa", "layer.0.attn.kv_a"),
    after(f"{_ATTENTION}.q_a_layernorm", "layer.0.attn.q_a_norm"),
    after(f"{_ATTENTION}.kv_a_layernorm", "layer.0.attn.kv_a_norm"),
    after(f"{_ATTENTION}.q_b_proj", "layer.0.attn.q"),
    before(f"{_ATTENTION}.rotary", "position", 2),
    after(f"{_ATTENTION}.rotary", "layer.0.attn.q_rope", lambda turned: turned[0].flatten(1)),
    after(f"{_ATTENTION}.rotary", "layer.0.attn.k_rope", lambda turned: turned[1].flatten(1)),
    before(f"{_ATTENTION}.o_proj", "layer.0.attn.context"),
    after(f"{_ATTENTION}.o_proj", "layer.0.attn.out"),
    before(f"{_LAYER}.post_attention_layernorm", "layer.0.attn.residual"),
    after(f"{_LAYER}.post_attention_layernorm", "layer.0.mlp.norm"),
    after(f"{_MLP}.gate_proj", "layer.0.mlp.gate"),
    after(f"{_MLP}.up_proj", "layer.0.mlp.up"),
    before(f"{_MLP}.down_proj", "layer.0.mlp.act"),
    after(f"{_MLP}.down_proj", "layer.0.mlp.out"),
    after(_LAYER, "layer.0.out"),
    after("norm", "norm"),
    after("lm_head", "logits"),
)


class SiteTap:
    """Hangs `receive` into every site of a draft and keeps count of the step.

    Args:
        hooks: takes the hooks off again.
        model: the draft.
        receive: called at every site of every step with the draft's own tensors, detached.

    Attributes:
        seen: nothing: what the config says is what is computed.
    """

    def __init__(self, hooks: Hooks, model: LatentDraft, receive: Receive) -> None:
        self._receive = receive
        self._step = -1
        self.seen: dict[str, Any] = {}
        # each step embeds its tokens first
        hooks.before(model.embed_tokens, lambda *_: self._begin_step())
        carry: Tap = after("norm" if model.shape.norm_output else _LAYER, "carry")
        hang(hooks, model, [*TAPS, carry], self._take)

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _begin_step(self) -> None:
        self._step += 1

    def _take(self, site: str, tensor: Any) -> None:
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor.detach())
