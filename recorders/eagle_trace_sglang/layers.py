"""The decoder layers of SGLang's draft model, wherever its release keeps them."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import HostError
from eagle_trace.families import EAGLE3, EAGLE3_MLA, Family
from eagle_trace_serving.parallel import place


def draft_layers(model: Any) -> list[tuple[str, Any]]:
    """The decoder layers of a draft and where they are: `model.layers.N`, or `model.midlayer` in older classes.

    Raises:
        HostError: the model has neither, or lacks what a call is told by: nothing of it can be recorded.
    """
    inner = getattr(model, "model", None)
    one = getattr(inner, "midlayer", None)
    layers = list(getattr(inner, "layers", ())) if one is None else []
    found = [(f"model.layers.{n}", layer) for n, layer in enumerate(layers)] or [("model.midlayer", one)]
    if found[0][1] is None or getattr(model, "logits_processor", None) is None:
        raise HostError(
            f"SGLang's draft class {type(model).__name__} cannot be recorded: it needs a `logits_processor`, and a "
            "`model` with `layers` (or `midlayer`); serve the draft as LlamaForCausalLMEagle3"
        )
    return found


def family_of(model: Any) -> Family:
    """Which sites a loaded draft has: by what its attention is made of."""
    attention = getattr(draft_layers(model)[0][1], "self_attn", None)
    return EAGLE3_MLA if hasattr(attention, "kv_lora_rank") else EAGLE3


def draft_place(model: Any) -> tuple[int, int]:
    """Rank of this process among those that run the draft together, and how many they are.

    The modules are asked, not the command line: under data-parallel attention the draft runs in a smaller group than
    the target.
    """
    attention = getattr(draft_layers(model)[0][1], "self_attn", None)
    # latent attention splits its heads at `q_b_proj`
    linear = getattr(attention, "qkv_proj", None) or getattr(attention, "q_b_proj", None)
    return (0, 1) if linear is None else place(linear)
