"""speculators: a config with the decoder's nested in it, layer ids by inputs, d2t as offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.trainers.base import Training

NAME = "speculators"
D2T = "offsets"
#: key of the decoder's config, and the model type it has where it names none
DECODER, DECODER_TYPE = "transformer_layer_config", "qwen3"
DRAFT_VOCABULARY = 32000


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a config is in speculators format."""
    return DECODER in config or "speculators_model_type" in config


def decoder_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder config inside a speculators config.

    Raises:
        CheckpointError: there is none.
    """
    layer = config.get(DECODER)
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"the speculators config has no {DECODER} object")
    return {"model_type": DECODER_TYPE, **layer}


def training_of(config: Mapping[str, Any]) -> Training:
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
