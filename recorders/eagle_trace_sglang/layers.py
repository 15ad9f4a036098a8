"""The decoder layers of SGLang's draft model, wherever its release keeps them."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import HostError


def draft_layers(model: Any) -> list[tuple[str, Any]]:
    """The decoder layers of a draft and where they are: `model.layers.N`, or `model.midlayer` in older classes.

    Raises:
        HostError: the model has neither, or lacks what a call is told by, or has latent attention, whose parts have
            no sites: nothing of it can be recorded.
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
    if hasattr(getattr(found[0][1], "self_attn", None), "kv_lora_rank"):
        raise HostError(
            f"SGLang's draft class {type(model).__name__} cannot be recorded: its multi-head latent attention has no "
            "sites here, which are those of a llama layer (LlamaForCausalLMEagle3)"
        )
    return found
