"""One name for each tensor of a draft, whoever stored it: speculators'.

The engine's loader is the judge of what a stored name means (SGLang 0.5.23, `LlamaForCausalLMEagle3.load_weights`): it
replaces older names anywhere in a name, takes any name with ``d2t`` in it for the vocabulary map and any with ``t2d``
for its inverse, and then looks for a parameter of that name, or of that name behind ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: names that older releases and checkpoints use, and their present ones: replaced anywhere in a name, in this order
LEGACY_NAMES = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
#: the vocabulary maps, found by these letters
MAPS = ("d2t", "t2d")
#: parts of a fused parameter, in its order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: parts of a parameter that an engine fuses on load, and that a checkpoint stores apart (latent attention's)
FUSED_ON_LOAD = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
#: the one parameter that the engine keeps beside its inner model, and so does not find behind ``model.``
_HEAD = "lm_head."
_INNER = "model."


def canonical_name(name: str) -> str:
    """Speculators' name of a tensor in a checkpoint, or of a parameter in an engine's module tree.

    A name that the engine finds no parameter for stays one that is no parameter's.
    """
    for old, new in LEGACY_NAMES.items():
        name = name.replace(old, new)
    for letters in MAPS:
        if letters in name:
            return letters
    inner = name.removeprefix(_INNER)
    return name if inner.startswith(_HEAD) else inner


def fills(name: str) -> tuple[str, ...]:
    """Canonical names of the parameters that a stored tensor is loaded into, should the draft have them.

    A fused tensor fills all of its parts, any other the one of its name.
    """
    canonical = canonical_name(name)
    for fused, parts in FUSED.items():
        if f".{fused}." in canonical:
            return tuple(canonical.replace(fused, part) for part in parts)
    return (canonical,)


def latent_fills(name: str) -> tuple[str, ...]:
    """The same for a draft with latent attention (SGLang 0.5.23, `Eagle3DeepseekV2ForCausalLM.load_weights`).

    Its loader is stricter: it knows the one layer as ``layers.0.`` or ``midlayer.`` at the start of a name, none of the
    older names, and nothing behind ``model.``. What is fused on load it takes in parts only; a stored
    ``fused_qkv_a_proj_with_mqa`` is dropped without a word.
    """
    for letters in MAPS:
        if name == letters or name.endswith(f".{letters}"):
            return (letters,)
    if any(fused in name for fused in FUSED_ON_LOAD):
        return ()
    trained = re.sub(r"^midlayer\.", "layers.0.", name)
    for fused, parts in FUSED.items():
        if f".{fused}." in trained:
            return tuple(trained.replace(fused, part) for part in parts)
    return (trained,)


def latent_filled(stored: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`latent_fills` of each of all stored names: a parameter fused on load is filled only where all its parts are."""
    filled = {name: latent_fills(name) for name in stored}
    there = {parameter for parameters in filled.values() for parameter in parameters}
    for name, parameters in filled.items():
        for parts in FUSED_ON_LOAD.values():
            mine = next((part for part in parts if f".{part}." in name), None)
            if mine and not all(one.replace(mine, part) in there for one in parameters for part in parts):
                filled[name] = ()
    return filled
