"""The flat config that makes SGLang serve a draft as it was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_trace_analysis.engines.sglang.accepts import config_class, fits
from eagle_trace_analysis.engines.sglang.engine import ARCHITECTURE
from eagle_trace_analysis.trainers.base import Training


def flat_config(training: Training, ids: Sequence[int], dtype: str) -> dict[str, Any]:
    """SGLang's config of a draft.

    Args:
        training: how it was trained.
        ids: layer ids as `ids_that_capture` gives them.
        dtype: what the weights are stored in.
    """
    return decoder_keys(training.decoder) | {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": training.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "norm_before_fc": training.norm_before_fc,
        },
        "fc_norm": training.fc_norm,
        "norm_output": training.norm_output,
    }


def decoder_keys(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """What a flat config takes over of the trained decoder's."""
    flat = {key: value for key, value in decoder.items() if not key.startswith("_")}
    # a share of each head is rotated by the engine's llama layer only: the layer that was trained rotates whole heads
    flat.pop("partial_rotary_factor", None)
    types = (config_class({"model_type": "llama"}) or {"types": {}})["types"]
    # a null where the class takes none stands for a key that is not there
    return {key: value for key, value in flat.items() if value is not None or fits(None, types.get(key, "None"))}
