"""`check` of a draft with latent attention: by the tables of its own class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.recording.names import latent_filled
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines.sglang import latent as tables
from tests.support import latent
from tests.support.check_cases import named
from tests.support.checkpoints import write_checkpoint

ATTENTION = latent.ATTENTION
Tensors = dict[str, Any]


def test_a_healthy_draft_fails_and_warns_of_nothing(tmp_path: Path) -> None:
    result = check(latent.write_draft(tmp_path))
    assert result.exit_status == 0
    assert {one.status for one in result.findings} == {Status.PASS, Status.SKIP}
    # no trainer has such a draft: nothing of theirs is asked for
    assert not [one for one in result.findings if "speculators" in one.evidence]
    assert named(result, "format").evidence == "SGLang format (Eagle3DeepseekV2ForCausalLM)"
    assert "values of 24, latents of 48 (queries) and 32" in named(result, "head-shape").evidence


@pytest.mark.parametrize("norms", [True, False])
def test_the_table_lists_what_such_a_draft_stores(norms: bool) -> None:
    config = latent.draft_config(fc_norm=norms)
    stored = {name: one.shape for name, one in latent.draft_tensors(config).items() if name not in ("d2t", "t2d")}
    known = tables.parameters(config)
    assert {name: known[name] for name in stored} == stored
    assert set(known) - set(stored) == {"embed_tokens.weight"}


def behind_model(tensors: Tensors) -> None:
    tensors["model.fc.weight"] = tensors.pop("fc.weight")


def fused(tensors: Tensors) -> None:
    parts = [tensors.pop(f"{ATTENTION}.{part}.weight") for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors[f"{ATTENTION}.fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(parts)


def without_latent_norm(tensors: Tensors) -> None:
    del tensors[f"{ATTENTION}.kv_a_layernorm.weight"]


def as_midlayer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


NAMES: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "behind model": (behind_model, "weight-names", "take the prefix 'model.' off their names"),
    "fused": (fused, "weight-names", "fused_qkv_a_proj_with_mqa"),
    "no latent norm": (without_latent_norm, "weights-present", "kv_a_layernorm.weight"),
}


@pytest.mark.parametrize("case", NAMES)
def test_what_the_stricter_loader_drops_is_said(case: str, tmp_path: Path) -> None:
    edit, finding, words = NAMES[case]
    found = named(check(latent.write_draft(tmp_path, edit)), finding)
    assert found.status is Status.FAIL
    assert words in f"{found.evidence}; {found.fix}"


def test_the_older_name_of_the_layer_is_loaded(tmp_path: Path) -> None:
    assert check(latent.write_draft(tmp_path, as_midlayer)).exit_status == 0


SETTINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "two layers": ({"num_hidden_layers": 2}, "config", "set num_hidden_layers to 1"),
    "no rank": ({"q_lora_rank": None}, "config", "retrain with a q_lora_rank"),
    "null value": ({"model_type": "llama", "v_head_dim": None}, "config", "set v_head_dim as trained"),
    "other rank": ({"kv_lora_rank": 48}, "head-shape", "kv_lora_rank"),
    "other heads": ({"num_attention_heads": 8}, "head-shape", "num_attention_heads"),
    "norms not asked for": ({"fc_norm": False}, "fc-norm", "set fc_norm to true"),
    "another activation": ({"hidden_act": "gelu"}, "decoder-layer", "a layer with latent attention"),
    "one layer fed": ({"eagle_config": {"use_aux_hidden_state": False}}, "aux-hidden-state", "use_aux_hidden_state"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_the_class_computes_otherwise_is_said(case: str, tmp_path: Path) -> None:
    changes, finding, words = SETTINGS[case]
    config = latent.draft_config(fc_norm="norms" in case)
    draft = write_checkpoint(tmp_path, config | changes, latent.draft_tensors(config))
    found = named(check(draft), finding)
    assert found.status is Status.FAIL, found
    assert words in f"{found.evidence}; {found.fix}"


def test_any_scaling_of_the_rotation_is_the_classes_own_yarn() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}  # fmt: skip
    assert tables.rope_settings(latent.draft_config(rope_scaling=rope))["rope_type"] == "deepseek_yarn"
    assert tables.rope_settings(latent.draft_config(rope_scaling=None))["rope_type"] == "default"


def test_a_quantised_kv_b_proj_stops_the_engine() -> None:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    refused = tables.quantisation_refused(said)
    assert refused is not None
    assert "kv_b_proj" in refused[1]
    assert tables.quantisation_refused(said | {"ignored_layers": [f"model.{ATTENTION}.kv_b_proj"]}) is None


def test_a_projection_fused_on_load_is_filled_where_all_its_parts_are_there() -> None:
    names = [f"{ATTENTION}.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert latent_filled(names) == {name: (name,) for name in names}
    assert latent_filled(names[:1]) == {names[0]: ()}
    assert latent_filled(names[1:]) == {names[1]: ()}
    whole = f"{ATTENTION}.fused_qkv_a_proj_with_mqa.weight"
    assert latent_filled([whole]) == {whole: ()}
