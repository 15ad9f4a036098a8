"""A draft's folder as SpecForge's class has it: flags translated, and what the class cannot express refused by name.

SpecForge writes `midlayer.*`, and its own export is taken as it is, flags included: that is what it trained. Any other
folder's flags mean what servers mean by them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_training.config import refuse_first
from eagle_trace_training.published import Published, beyond_one_layer, read_flat_config, read_published

CLASS = "LlamaForCausalLMEagle3"
OWN = "midlayer."
#: rotations whose tables SpecForge builds as servers do
ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
WAY_OUT = "record the trainer that it comes from, or compare two servers"


def read_head(draft: Path) -> Published:
    """Read a draft's folder, SpecForge's own or a published one.

    Raises:
        CheckpointError: it is another kind of folder, or SpecForge's class cannot express what it holds.
    """
    head_config(draft)
    found = read_published(draft, lambda name: name.replace("layers.0.", OWN, 1))
    if not any(OWN in name for name in found.stored):
        _translate_flags(found)
    if found.config.get("architectures") != [CLASS]:
        found.translated.append(f"architectures {found.config.get('architectures')}: {CLASS}")
        found.config["architectures"] = [CLASS]
    if (slices := found.number("pretraining_tp", 1)) > 1:
        found.translated.append(f"pretraining_tp {slices}: 1, the same sums without slices of weights")
        found.config["pretraining_tp"] = 1
    _check(found)
    return found


def head_config(draft: Path) -> dict[str, Any]:
    """The config of a draft that can be read; raises CheckpointError for another kind of folder."""
    if draft.is_dir() and not (draft / "config.json").exists() and any(draft.glob("training_state*.pt")):
        raise CheckpointError(
            f"{draft} is a checkpoint of SpecForge in training: export it (specforge export --to sglang) and give the "
            "folder that was exported"
        )
    return read_flat_config(draft)


def _translate_flags(found: Published) -> None:
    """`norm_output`, which is servers' word for a normed carry, and another thing to SpecForge 0.2.0."""
    if found.config.get("norm_output"):
        raise CheckpointError(
            f"{found.folder} is served with norm_output true (the carry is normed), which SpecForge's class cannot "
            f"express: {WAY_OUT}"
        )
    if "norm_output" in found.config:
        del found.config["norm_output"]
        found.translated.append("norm_output false, as servers mean it (the carry is not normed): left out")


def _check(found: Published) -> None:
    """Raises CheckpointError for the first thing that SpecForge's class cannot express."""
    config, state, inner = found.config, found.state, found.part("eagle_config")
    biases = sorted(name for name in state if name.endswith(".bias"))
    used = [name for name in biases if state[name].count_nonzero()]
    fc = state.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise CheckpointError(f"{found.folder} has no fc.weight: it is not an EAGLE-3 draft")
    features = fc.shape[1] / found.number("target_hidden_size", found.number("hidden_size"))
    refused = [
        *beyond_one_layer(found, ROPE),
        (used, f"has biases ({', '.join(used[:2])}, ...)"),
        (features != 3, f"takes {features:g} features of the target, not 3"),
        (inner.get("norm_before_fc") or config.get("norm_before_fc"), "norms its features together (norm_before_fc)"),
        (inner.get("use_aux_hidden_state") is False, "takes no features of inner layers (use_aux_hidden_state false)"),
    ]
    refuse_first(found.folder, refused, f", which SpecForge's class cannot express: {WAY_OUT}")
    for name in biases:
        del state[name]
        found.translated.append(f"{name} is zero: left out")
