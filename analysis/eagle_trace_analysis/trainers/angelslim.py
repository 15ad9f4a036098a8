"""AngelSlim: the EAGLE-3 repository's layer under vLLM's class name (read in August 2026, commit 67394ce).

`angelslim/compressor/speculative/train`: layers are fed by `hidden_states[id + 1]`, by default of [1, L/2 - 1, L - 4];
the rotary embedding is built without the config's base, but for multimodal sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.trainers import flat
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training
from eagle_trace_analysis.trainers.flat import D2T, EAGLE3_FORMS, default_layers, recognises, rope, window

NAME, TITLE = "angelslim", "AngelSlim"
REFERENCE = "the draft_model_config it was trained with"
FORMS = EAGLE3_FORMS
LAYER_IDS, NAMES_LAYERS = "outputs", True
SPARE_ROWS: int | None = 0
ARCHITECTURES = ("Eagle3LlamaForCausalLM", "CosyVoice3Eagle3LlamaForCausalLM")
#: keys that its recipes write into a draft's config
OWN_KEYS = ("target_model_type", "modal_type")


def marks(folder: Folder) -> Marks | None:
    """vLLM's class name over the trainers' name of the layer, and keys of its own."""
    if flat.architecture(folder) not in ARCHITECTURES:
        return None
    own = [key for key in OWN_KEYS if key in folder.config]
    if own:
        return Marks((f"the class {flat.architecture(folder)}", f"the config has {', '.join(own)}"), sure=True)
    if flat.has_layer(folder):
        return Marks((f"the class {flat.architecture(folder)}", "midlayer.* names"))
    return None


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:  # noqa: ARG001
    """How the draft with this config was trained.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    return flat.training_of(config, flat.outputs_named(config), FORMS)


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """The base of the rotary embedding."""
    return flat.no_base(TITLE, "models/draft/llama_eagle3.py, August 2026", config, theta)
