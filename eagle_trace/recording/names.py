"""One name for each tensor of a draft, whoever stored it: speculators'.

The engine's loader is the judge of what a stored name means (SGLang 0.5.23, `LlamaForCausalLMEagle3.load_weights`): it
replaces older names anywhere in a name, takes any name with ``d2t`` in it for the vocabulary map and any with ``t2d``
for its inverse, and then looks for a parameter of that name, or of that name behind ``model.``.
"""

from __future__ import annotations

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
