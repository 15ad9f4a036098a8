"""Where sites are found in any trainer's draft: the step that is counted, and the tables that trainers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Tap, after, before, hang
from eagle_trace_training.host import Receive
from eagle_trace_training.releases import Releases

#: what comes before the first layer; a step begins when its tokens are embedded
ENTRANCE = (
    before("fc", "fc.in", name="hidden_states"),
    after("fc", "fc.out"),
    before("embed_tokens", "token"),
    after("embed_tokens", "embed"),
)
#: what an attention shows that projects queries, keys and values by themselves, but for what is rotated
PLAIN_ATTENTION = (after("v_proj", "v"),)


def layer_taps(module: str, number: int = 0, attention: Iterable[Tap] = PLAIN_ATTENTION) -> list[Tap]:
    """A decoder layer by Hugging Face's names for Llama's.

    Args:
        module: its path from the model on.
        number: of the layer; the first norms the embedding beside the hidden state.
        attention: sites between the norms and the output's projection, by paths from the attention on and names behind
            ``attn``.
    """
    at = f"layer.{number}"
    inner, mlp = f"{module}.self_attn", f"{module}.mlp"
    norms = [after(f"{module}.input_layernorm", f"{at}.hidden_norm")]
    if number == 0:
        norms = [
            after(f"{module}.input_layernorm", f"{at}.embed_norm"),
            after(f"{module}.hidden_norm", f"{at}.hidden_norm"),
        ]
    return [
        *norms,
        *(Tap(f"{inner}.{tap.module}", tap.when, f"{at}.attn.{tap.site}", tap.pick) for tap in attention),
        before(f"{inner}.o_proj", f"{at}.attn.context", name="hidden_states"),
        after(f"{inner}.o_proj", f"{at}.attn.out"),
        before(f"{module}.post_attention_layernorm", f"{at}.attn.residual", name="hidden_states"),
        after(f"{module}.post_attention_layernorm", f"{at}.mlp.norm"),
        after(f"{mlp}.gate_proj", f"{at}.mlp.gate"),
        after(f"{mlp}.up_proj", f"{at}.mlp.up"),
        before(f"{mlp}.down_proj", f"{at}.mlp.act", name="hidden_states"),
        after(f"{mlp}.down_proj", f"{at}.mlp.out"),
        after(module, f"{at}.out"),
    ]


class SiteTap:
    """Hangs `receive` into every site of a draft and keeps count of the step.

    The receiver gets the host's own tensors, detached, and must copy what it keeps. Call `restart` before each forward.
    A trainer whose sites are not all inputs and outputs of modules derives its own from it.

    Args:
        hooks: takes the hooks off again.
        model: the draft, which embeds the tokens of each step by its `embed_tokens`.
        taps: its sites.
        receive: called at every site of every step.
        releases: of the trainer.

    Attributes:
        seen: see `HungTaps`; nothing, unless the trainer's own class observes something.

    Raises:
        HostError: the draft lacks a place that the recorder knows.
    """

    def __init__(
        self, hooks: Hooks, model: Any, taps: Iterable[Tap], receive: Receive, releases: Releases | None = None
    ) -> None:
        self._receive = receive
        self._step = -1
        self._releases = releases
        self.seen: dict[str, Any] = {}
        hooks.before(model.embed_tokens, lambda *_: self._begin_step())
        missing = hang(hooks, model, taps, self._take)
        if missing and releases is not None:
            raise releases.other(f"has no {', '.join(sorted(set(missing.values())))} in its draft", "has")

    def restart(self) -> None:
        """A new forward begins."""
        self._step = -1

    def _begin_step(self) -> None:
        self._step += 1

    def _take(self, site: str, tensor: Any) -> None:
        # the projection of the features runs before the first step has begun
        self._receive(max(self._step, 0), site, tensor.detach())

    def _take_rotated(self, layer: int, given: tuple[Any, ...], turned: tuple[Any, ...]) -> None:
        """Queries and keys before and after their rotation, [B, heads, T, head size] each."""
        for name, tensor in (("q", given[0]), ("k", given[1]), ("q_rope", turned[0]), ("k_rope", turned[1])):
            self._take(f"layer.{layer}.attn.{name}", tensor.transpose(1, 2).flatten(2))
