"""TorchSpec: SpecForge's layer, exported by `tools/convert_to_hf.py` (read in 2026, commit 6f21829).

Names are `midlayer.*`, or `layers.0.*` where it exports for vLLM; the version stands in the config and in the header
of the weights. Layers are captured by a patched SGLang, by ids of the run's own (`aux_hidden_states_layers`), which
nothing exports. `--prune-vocab` picks the head's rows by d2t as it is stored, which are offsets and not ids: `check`
finds the rows that are equal then (head-rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.trainers import flat
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training
from eagle_trace_analysis.trainers.flat import D2T, EAGLE3_FORMS, default_layers, recognises, rope, window

NAME, TITLE = "torchspec", "TorchSpec"
REFERENCE = "the draft_model_config it was trained with"
FORMS = EAGLE3_FORMS
LAYER_IDS, NAMES_LAYERS = "sglang", False
SPARE_ROWS: int | None = 20


def marks(folder: Folder) -> Marks | None:
    """Its version, in the config or in the weights' header."""
    said = [f"the config has _torchspec_version {folder.config['_torchspec_version']}"] if (
        "_torchspec_version" in folder.config
    ) else []  # fmt: skip
    if "torchspec_version" in folder.metadata:
        said.append("the weights' header has torchspec_version")
    return Marks(tuple(said), sure=True) if said else None


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:  # noqa: ARG001
    """How the draft with this config was trained.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    return flat.training_of(config, flat.outputs_named(config), FORMS)


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """None by its config alone."""
    return []
