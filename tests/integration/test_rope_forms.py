"""The rotary frequencies of `eagle_trace_analysis.replay.form` against those that transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle_trace_analysis.replay.form import rope_of

pytestmark = pytest.mark.integration

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=32768, rope_parameters=KINDS[kind]
    )
    theirs = LlamaRotaryEmbedding(config)
    found = rope_of(config.to_dict()).frequencies(128)
    assert found is not None
    np.testing.assert_allclose(found[0], theirs.inv_freq.double().numpy(), rtol=1e-6)
    assert found[1] == pytest.approx(theirs.attention_scaling)
