"""The target as transformers has it: a language model, or one inside a multimodal wrapper, and its decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eagle_trace.errors import CheckpointError

#: where a model keeps the part that holds the decoder layers, beside what `get_decoder` says
_INNER = ("language_model", "model", "text_model")


def load_target(target: Path, dtype: Any) -> Any:
    """The target in `dtype` (a torch dtype), on the CPU.

    Each family is loaded by its own auto class. Experts run one after the other: torch has no grouped product in
    float64, in which the rounding floor is measured. A class without fused attention (gpt-oss) gets the eager one.

    Raises:
        CheckpointError: transformers cannot load it.
    """
    try:
        # never the code that lies in the folder: transformers would ask on the terminal, and wait
        config = AutoConfig.from_pretrained(target, trust_remote_code=False)
        maker = _maker(config)
        attention = "sdpa" if _has_sdpa(maker, config) else "eager"
        return maker.from_pretrained(
            target, dtype=dtype, attn_implementation=attention, experts_implementation="eager", trust_remote_code=False
        )
    except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"transformers cannot load the target {target}: {lines[0]}") from error


def _maker(config: Any) -> Any:
    """The auto class that has this family."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _has_sdpa(maker: Any, config: Any) -> bool:
    if type(config) not in maker._model_mapping:
        return True  # `from_pretrained` says what is wrong
    found = maker._model_mapping[type(config)]
    classes = found if isinstance(found, tuple) else (found,)
    return all(getattr(one, "_supports_sdpa", True) for one in classes)


def decoder_of(model: Any, target: Path) -> Any:
    """The module of a loaded target that holds its decoder `layers` and their final `norm`.

    Raises:
        CheckpointError: it has none, so there is nothing to take features from.
    """
    found = _decoder(model)
    if found is None:
        raise CheckpointError(
            f"the target {target} ({type(model).__name__}) has no decoder layers to take features from"
        )
    return found


def _decoder(model: Any) -> Any | None:
    waiting, seen = [model], set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "layers") and hasattr(one, "norm"):
            return one
        waiting += [one.get_decoder()] if hasattr(one, "get_decoder") else []
        waiting += [getattr(one, name, None) for name in _INNER]
    return None
