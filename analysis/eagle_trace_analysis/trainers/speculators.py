"""speculators: a config with the decoder's nested in it, layer ids by inputs, d2t as offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Training

NAME = TITLE = "speculators"
REFERENCE = "the speculators folder it came from"
D2T = "offsets"
LAYER_IDS, NAMES_LAYERS = "inputs", True
#: it saves every setting, and has each in both forms
FORMS: Mapping[str, bool] = {}
#: transformers computes the angles of each batch
SPARE_ROWS: int | None = None
#: key of the decoder's config, and the model type it has where it names none
DECODER, DECODER_TYPE = "transformer_layer_config", "qwen3"
DRAFT_VOCABULARY = 32000


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a config is in speculators format."""
    return DECODER in config or "speculators_model_type" in config


def marks(folder: Folder) -> Marks | None:
    """Its own format, or what `eagle-trace export` makes of it for a server."""
    config = folder.config
    if recognises(config):
        return Marks((f"its config is in {NAME} format",), sure=True)
    inner = config.get("eagle_config")
    exported = isinstance(inner, Mapping) and {"norm_before_fc", "use_aux_hidden_state"} <= set(inner)
    if exported and {"fc_norm", "norm_output", "draft_vocab_size"} <= set(config):
        return Marks(("its config has the keys that `eagle-trace export` writes of a speculators draft",))
    return None


def doubts(config: Mapping[str, Any], theta: float, release: str | None) -> list[Doubt]:  # noqa: ARG001
    """What is deployed of it is an export, which says what was trained."""
    return []


def decoder_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder config inside a speculators config.

    Raises:
        CheckpointError: there is none.
    """
    layer = config.get(DECODER)
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"the speculators config has no {DECODER} object")
    return {"model_type": DECODER_TYPE, **layer}


def training_of(config: Mapping[str, Any], release: str | None = None) -> Training:  # noqa: ARG001
    """How the draft with this config was trained.

    Raises:
        CheckpointError: the config describes no decoder.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return Training(
        decoder=decoder_of(config),
        layer_ids=ids or None,
        own_embedding=bool(config.get("embed_requires_grad")),
        draft_vocab_size=config.get("draft_vocab_size", DRAFT_VOCABULARY),
        **{flag: bool(config.get(flag)) for flag in flags},
    )


def default_layers(layers: int) -> list[int]:
    """The inputs of an early, a middle and a late layer of a target of `layers` layers."""
    return [2, layers // 2, layers - 3]


def rope(decoder: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding that was trained: transformers' llama layer rotates whole heads, whatever is asked for."""
    whole = {"partial_rotary_factor": 1.0} if decoder.get("model_type", "llama") == "llama" else {}
    return {**asked, **whole}


def window(decoder: Mapping[str, Any]) -> int | None:
    """Tokens a query saw in training, itself included; None for all."""
    kinds = decoder.get("layer_types")
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    return int(decoder["sliding_window"]) if slides and decoder.get("sliding_window") else None
