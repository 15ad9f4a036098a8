"""What the loaded target's class gives its draft: whether it captures several layers, and which."""

from __future__ import annotations

from typing import Any

#: the flag and the list that `set_eagle3_layers_to_capture` sets, on the model or on one inside it
FLAG, LAYERS = "capture_aux_hidden_states", "layers_to_capture"
_INNER = ("language_model", "model", "llm", "thinker")


def target_facts(model: Any) -> dict[str, Any]:
    """What the manifest says of SGLang's target model.

    Returns:
        `architecture`: its class; `captures`: whether it was told to capture (None where it has no such flag);
        `captured_inputs`: layers whose input it feeds the draft (None where it has no such list).
    """
    flags, lists = [], []
    waiting, seen = [model], set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        flags += [getattr(one, FLAG)] if isinstance(getattr(one, FLAG, None), bool) else []
        lists += [getattr(one, LAYERS)] if isinstance(getattr(one, LAYERS, None), list | tuple | set) else []
        waiting += [getattr(one, name, None) for name in _INNER]
    layers = next((found for found in lists if found), lists[0] if lists else None)
    return {
        "architecture": type(model).__name__,
        "captures": any(flags) if flags else None,
        "captured_inputs": None if layers is None else sorted(int(layer) for layer in layers),
    }
