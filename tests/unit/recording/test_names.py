"""One name for a tensor, whoever asks: the engine's loader is the judge (tests/integration/test_engine_table.py)."""

from __future__ import annotations

import pytest

from eagle_trace.recording.names import canonical_name, fills
from eagle_trace_analysis.engines.sglang import engine

LAYER = "layers.0.self_attn"
TABLE = {
    "fc.weight": "fc.weight",
    "model.fc.weight": "fc.weight",
    "model.model.fc.weight": "model.fc.weight",
    "lm_head.weight": "lm_head.weight",
    "model.lm_head.weight": "model.lm_head.weight",
    "midlayer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "model.midlayer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "my_midlayer.weight": "my_layers.0.weight",
    "layers.0.midlayer_x.weight": "layers.0.layers.0_x.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "draft.d2t": "d2t",
    "model.d2t": "d2t",
    "eagle3.t2d": "t2d",
    "decoder.mlp.up_proj.weight": "decoder.mlp.up_proj.weight",
}


@pytest.mark.parametrize(("stored", "expected"), TABLE.items())
def test_a_stored_name_means_what_the_engines_loader_makes_of_it(stored: str, expected: str) -> None:
    assert canonical_name(stored) == expected
    assert engine.canonical_name is canonical_name


def test_a_name_that_the_engine_drops_is_no_parameters() -> None:
    known = {"fc.weight", "lm_head.weight"}
    dropped = {"model.lm_head.weight", "model.model.fc.weight", "my_midlayer.weight", "layers.0.midlayer_x.weight"}
    assert not any(engine.destinations(name, known) for name in dropped)
    assert engine.destinations("draft.d2t", known) == ("d2t",)
    assert not any(set(fills(name)) & known for name in dropped)


def test_a_fused_tensor_fills_its_parts() -> None:
    assert fills(f"model.{LAYER}.qkv_proj.weight") == tuple(f"{LAYER}.{part}_proj.weight" for part in "qkv")
    assert fills("midlayer.mlp.gate_up_proj.weight") == (
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
    )
    assert fills("fc.weight") == ("fc.weight",)
