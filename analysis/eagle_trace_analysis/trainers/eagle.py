"""The EAGLE-3 repository (SafeAILab/EAGLE): `config.json` and `pytorch_model.bin` (read in 2026, commit cb7e084).

`eagle/traineagle3`: the inputs of the layers 2, L/2 and L - 3 are fed, nothing names others; the rotary embedding is
built without the config's base; frozen parameters are not saved, so there is no embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.trainers import flat
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training
from eagle_trace_analysis.trainers.flat import D2T, EAGLE3_FORMS, default_layers, recognises, rope, window

NAME, TITLE = "eagle", "the EAGLE-3 repository"
REFERENCE = "the config.json it was trained with"
FORMS = EAGLE3_FORMS
LAYER_IDS, NAMES_LAYERS = "inputs", True
SPARE_ROWS: int | None = 0


def marks(folder: Folder) -> Marks | None:
    """`midlayer.*` in a file that torch.save wrote."""
    pickled = [name for name in folder.files if name.endswith(".bin")]
    if not pickled or not flat.has_layer(folder) or not flat.architecture(folder).startswith("Llama"):
        return None
    return Marks((f"midlayer.* names in {sorted(pickled)[0]}",))


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:  # noqa: ARG001
    """How the draft with this config was trained.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    return flat.training_of(config, None, FORMS)


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """The base of the rotary embedding."""
    return flat.no_base(TITLE, "eagle/traineagle3/cnets.py, 2026", config, theta)
