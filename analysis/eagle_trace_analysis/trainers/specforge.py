"""SpecForge: a flat config, layer ids by outputs, `norm_output` in a sense of its own.

Read from the wheel specforge 0.2.0 (`modeling/draft/llama3_eagle.py`, `export/`, `config/schema.py`); what its forward
computes is recorded by `eagle_trace_specforge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_trace_analysis.trainers import flat
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training
from eagle_trace_analysis.trainers.flat import D2T, default_layers, recognises, rope, window

NAME, TITLE = "specforge", "SpecForge"
REFERENCE = "SpecForge's draft_config.json or its run-stepN folder"
FORMS = {"norm_before_residual": False, "norm_before_fc": False}
#: ids are read by the target's class in SGLang, which captures the features; a recipe's own ids are not exported
LAYER_IDS, NAMES_LAYERS = "sglang", False
SPARE_ROWS: int | None = 20
#: releases in which `norm_output` means the norm before the head, and the carry is never normed
HEAD_NORM_BY_FLAG = frozenset({"0.2.0"})
ARCHITECTURE = "LlamaForCausalLMEagle3"
MISSING_FROM_HEAD = (
    "take norm_output out of the draft's config and train again: no server leaves out the norm before the head"
)


def marks(folder: Folder) -> Marks | None:
    """`midlayer.*`, both maps of the vocabulary, no embedding, in safetensors: what `specforge export` writes."""
    maps = {"t2d", "d2t"} <= set(folder.names)
    pickled = any(name.endswith((".bin", ".pt")) for name in folder.files)
    if flat.architecture(folder) != ARCHITECTURE or not flat.has_layer(folder) or not maps or pickled:
        return None
    if flat.has_embedding(folder):
        return None
    return Marks(("midlayer.* names", "d2t and t2d", "no embedding", f"the class {ARCHITECTURE}"))


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:
    """How the draft with this config was trained. Without a release the flag `norm_output` is taken as servers do.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    forms = dict(FORMS)
    head = True
    if release in HEAD_NORM_BY_FLAG:
        forms["norm_output"] = False
        head = bool(config.get("norm_output", True))
    trained = flat.training_of(config, flat.outputs_named(config), forms)
    return replace(trained, head_norm=head)


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """`norm_output`, whose meaning depends on the release."""
    flag, certain = config.get("norm_output"), release in HEAD_NORM_BY_FLAG
    if flag is None or (release is not None and not certain):
        return []
    say = "" if certain else "; give the release as --trainer specforge==0.2.0"
    if flag:
        why = (
            f"norm_output is true: {TITLE} {', '.join(sorted(HEAD_NORM_BY_FLAG))} trains that with the carry as it is, "
            "servers norm the carry, from step 1 on"
        )
        fix = f"set norm_output to false if it was trained with that release, nothing if with a later one{say}"
        return [Doubt("norm-output", why, "set norm_output to false" if certain else fix, "carry-norm", certain)]
    why = (
        f"norm_output is false: {TITLE} {', '.join(sorted(HEAD_NORM_BY_FLAG))}, trained with that, leaves out the norm "
        "before the head, which no server does"
    )
    fix = (
        f"if it was trained with norm_output false and not only deployed so, {MISSING_FROM_HEAD}; give {REFERENCE} as "
        "--reference"
    )
    return [Doubt("norm-output", why, fix, "head-norm")]
