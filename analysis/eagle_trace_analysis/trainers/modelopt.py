"""NVIDIA ModelOpt: a flat config that names everything, also what neither config had (as null).

Read from its `modelopt/torch/export/plugins/hf_spec_export.py`, `hf_spec_configs.py` and the default layers of
`modelopt/torch/speculative/plugins` (2025 and 2026): names are `layers.N.*`, ids are of the layers whose output a hook
takes, a head of the target's is written where the draft has none, and a quantised draft says so in its config and in
`hf_quant_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.trainers import flat
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training
from eagle_trace_analysis.trainers.flat import D2T, default_layers, recognises, rope, window

NAME, TITLE = "modelopt", "NVIDIA ModelOpt"
REFERENCE = "the config of the training as a flat config.json"
#: it has been given further forms since
FORMS: Mapping[str, bool] = {}
LAYER_IDS, NAMES_LAYERS = "outputs", True
SPARE_ROWS: int | None = None
#: keys of `eagle_config` that it alone writes
OWN_KEYS = ("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")


def marks(folder: Folder) -> Marks | None:
    """Keys of its own in `eagle_config`."""
    inner = folder.config.get("eagle_config")
    own = [key for key in OWN_KEYS if key in inner] if isinstance(inner, Mapping) else []
    return Marks((f"eagle_config has {', '.join(own)}",), sure=True) if own else None


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:  # noqa: ARG001
    """How the draft with this config was trained.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    return flat.training_of(config, flat.outputs_named(config), FORMS)


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """Settings of its class that servers have in one form only, and a scaling that is written for serving alone."""
    inner = config.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    found = []
    if inner.get("use_last_layernorm") is False:
        why = "use_last_layernorm is false: it was trained without the norm before the head, which no server leaves out"
        found.append(Doubt("norm-output", why, "train with use_last_layernorm", "head-norm", True))
    scaling = config.get("rope_scaling")
    kind = (scaling.get("rope_type") or scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind == "yarn":
        why = (
            f"rope_scaling is {kind}, which {TITLE} can write for serving (eagle_export_rope_scaling) over a training "
            "without"
        )
        fix = "leave it if that was meant; within the trained length serving without it is what was trained"
        found.append(Doubt("rope", why, fix, "rope-theta"))
    return found
