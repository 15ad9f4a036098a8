"""What trainers have in common that save a draft in the flat form which servers load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_trace.checkpoints import class_names
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.trainers.base import Doubt, Folder, Training, flat_training

D2T = "offsets"
#: how such trainers call the draft's one decoder layer
LAYER = "midlayer."
#: the residual stream starts from the hidden state, which enters the layer behind a norm of its own; the carry is what
#: the layer puts out. That is the layer of the EAGLE-3 repository (`LlamaDecoderLayeremb`), which others took over
EAGLE3_FORMS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def recognises(config: Mapping[str, Any]) -> bool:  # noqa: ARG001
    """No config alone says that such a trainer wrote it: see `marks`."""
    return False


def training_of(config: Mapping[str, Any], ids: list[int] | None, forms: Mapping[str, bool]) -> Training:
    """How a draft with this config was trained.

    Args:
        config: as the trainer read it.
        ids: layers fed, by their inputs.
        forms: settings that the class has in one form only.

    Raises:
        CheckpointError: it is not the config of a draft.
    """
    if not isinstance(config.get("hidden_size"), int):
        raise CheckpointError("this is not a draft's config: it has no hidden_size")
    said = flat_training(config)
    vocabulary = said.draft_vocab_size or config.get("vocab_size") or 0
    known: dict[str, Any] = {**forms, "layer_ids": ids, "draft_vocab_size": vocabulary}
    return replace(said, **known)


def outputs_named(config: Mapping[str, Any]) -> list[int] | None:
    """The layers that a config names by their outputs, by their inputs; None if it names none."""
    inner = config.get("eagle_config")
    ids = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, Mapping) else None
    whole = isinstance(ids, list) and all(type(one) is int for one in ids)
    return sorted(one + 1 for one in ids) if whole and ids else None


def default_layers(layers: int) -> list[int]:
    """The inputs of an early, a middle and a late layer of a target of `layers` layers."""
    return [2, layers // 2, layers - 3]


def rope(decoder: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """The rotary embedding that was trained: as asked for, over whole heads."""
    return {**asked, "partial_rotary_factor": 1.0}


def window(decoder: Mapping[str, Any]) -> int | None:  # noqa: ARG001
    """All tokens are seen: no such trainer has a window."""
    return None


def no_base(title: str, source: str, config: Mapping[str, Any], theta: float) -> list[Doubt]:
    """The doubt about a base that the trainer's class does not read.

    Args:
        title: the trainer.
        source: where that was read.
        config: as it is deployed.
        theta: the base that an engine takes from it.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    sections = isinstance(scaling, Mapping) and "mrope_section" in scaling
    if theta == 10000 or sections:
        return []
    why = (
        f"the config says rope_theta {theta:g}; {title}'s class for a draft does not read it and rotates by 10000 "
        f"({source})"
    )
    fix = (
        "if it was trained with that class, set rope_theta to 10000; if with one that reads rope_theta, nothing. "
        "A recorded pair of traces says which"
    )
    return [Doubt("rope", why, fix, "rope-theta")]


def architecture(folder: Folder) -> str:
    """The class that the config names first; empty if none."""
    return next(iter(class_names(folder.config)), "")


def has_layer(folder: Folder) -> bool:
    """Whether the decoder layer has the trainers' own name."""
    return any(name.removeprefix("model.").startswith(LAYER) for name in folder.names)


def has_embedding(folder: Folder) -> bool:
    """Whether an embedding is stored."""
    return any(name.endswith("embed_tokens.weight") for name in folder.names)
