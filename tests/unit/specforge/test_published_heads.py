"""Heads in the format that servers load, as SpecForge's class has them; no trainer is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from eagle_trace.errors import CheckpointError
from eagle_trace_specforge.host import HOST
from eagle_trace_specforge.published import read_head
from tests.support import checkpoints as make

CONFIG = {
    **make.decoder_config(1),
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": make.DRAFT_VOCABULARY,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True},
}
TENSORS = {name: one for name, one in make.draft_tensors().items() if not name.startswith("embed")}


def own(names: Mapping[str, Any] = TENSORS) -> dict[str, Any]:
    return {name.replace("layers.0.", "midlayer."): one for name, one in names.items()}


def fused() -> dict[str, Any]:
    """vLLM's and some trainers' fused projections."""
    found = dict(TENSORS)
    for parts, name in ((("q", "k", "v"), "self_attn.qkv_proj"), (("gate", "up"), "mlp.gate_up_proj")):
        room = name.split(".")[0]
        held = [found.pop(f"layers.0.{room}.{part}_proj.weight") for part in parts]
        found[f"layers.0.{name}.weight"] = np.concatenate(held)
    return found


def behind(prefix: str) -> dict[str, Any]:
    """As a whole model is saved: all but the head lies inside."""
    return {name if name.startswith("lm_head") else f"{prefix}{name}": one for name, one in TENSORS.items()}


HIDDEN, D2T = make.HIDDEN, TENSORS["d2t"]
EXPRESSED = {
    "SpecForge's own export": (CONFIG, own()),
    "SpecForge's own, norm_output and all": (CONFIG | {"norm_output": True}, own()),
    "eagle-trace's export": (CONFIG | {"norm_output": False, "norm_before_residual": False}, TENSORS),
    "ModelOpt": (CONFIG | {"model_type": "llama", "has_lm_head": True}, own()),
    "vLLM's class name": (CONFIG | {"architectures": ["Eagle3LlamaForCausalLM"]}, TENSORS),
    "another family's class name": (CONFIG | {"architectures": ["LlamaForCausalLMEagle3DeepSeek"]}, own()),
    "names behind model.": (CONFIG, behind("model.")),
    "fused projections": (CONFIG, fused()),
    "the target's layer count left over": (CONFIG | {"num_hidden_layers": 30}, own()),
    "biases of zero": (CONFIG, TENSORS | {"layers.0.self_attn.q_proj.bias": np.zeros(64, ml_dtypes.bfloat16)}),
    "an embedding of its own": (CONFIG, own() | {"embed_tokens.weight": make.draft_tensors()["embed_tokens.weight"]}),
    "no inverse map": (CONFIG, {name: one for name, one in own().items() if name != "t2d"}),
    "no ids": ({**CONFIG, "eagle_config": {"use_aux_hidden_state": True}}, own()),
    "no eagle_config": ({name: one for name, one in CONFIG.items() if name != "eagle_config"}, own()),
    "weights in slices": (CONFIG | {"pretraining_tp": 2}, own()),
    "old rope keys": ({**CONFIG, "rope_parameters": None, "rope_theta": 1e5, "rope_scaling": None}, own()),
}


def written(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    import json

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    make.write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("name", EXPRESSED)
def test_a_published_head_is_expressed_in_the_trainers_class_with_every_number_kept(name: str, tmp_path: Path) -> None:
    config, tensors = EXPRESSED[name]
    draft = written(tmp_path / "draft", config, tensors)
    assert HOST.takes(draft)
    head = read_head(draft)
    for known, expected in own().items():
        if known in head.state:
            held = head.state[known]
            assert np.array_equal(
                held.view(torch.int16 if held.dtype == torch.bfloat16 else held.dtype).numpy(),
                expected.view(np.int16) if expected.dtype == ml_dtypes.bfloat16 else expected,
            ), known
    assert set(own()) - set(head.state) <= {"t2d"}
    assert not [one for one in head.state if one.endswith(".bias") or one.startswith(("layers.", "model."))]
    assert head.config["architectures"] == ["LlamaForCausalLMEagle3"]
    changed = config.get("architectures") != ["LlamaForCausalLMEagle3"] or set(tensors) - set(head.state)
    assert bool(head.translated) == bool(changed or config.get("pretraining_tp"))


def test_flags_are_translated_of_what_others_wrote_and_kept_of_its_own(tmp_path: Path) -> None:
    theirs = read_head(written(tmp_path / "theirs", CONFIG | {"norm_output": False}, TENSORS))
    assert "norm_output" not in theirs.config
    mine = read_head(written(tmp_path / "mine", CONFIG | {"norm_output": False}, own()))
    assert mine.config["norm_output"] is False
    assert mine.translated == []


SECOND = {"layers.1.mlp.up_proj.weight": np.zeros((4, 4), ml_dtypes.bfloat16)}
REFUSED = {
    "speculators' format": (make.speculators_config(), TENSORS, "record it with --host speculators"),
    "a normed carry": (CONFIG | {"norm_output": True}, TENSORS, "served with norm_output true"),
    "two layers": (CONFIG, TENSORS | SECOND, r"more than one layer \(layers\.1\.mlp"),
    "a bias": (CONFIG, TENSORS | {"layers.0.self_attn.q_proj.bias": np.ones(64, ml_dtypes.bfloat16)}, "has biases"),
    "one feature": (CONFIG, own() | {"fc.weight": np.zeros((HIDDEN, HIDDEN), ml_dtypes.bfloat16)}, "takes 1 features"),
    "eight bits": (CONFIG, own() | {"fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), np.int8)}, "quantised tensors"),
    "a quantization_config": (CONFIG | {"quantization_config": {"bits": 4}}, own(), "has a quantization_config"),
    "norm_before_residual": (CONFIG | {"norm_before_residual": True}, own(), "norm_before_residual"),
    "norm_before_fc": (CONFIG | {"norm_before_fc": True}, own(), "norms its features together"),
    "sections": ({**CONFIG, "rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, own(), "rotates by mrope"),
    "longrope": ({**CONFIG, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, own(), "longrope"),
    "no features": ({**CONFIG, "eagle_config": {"use_aux_hidden_state": False}}, own(), "use_aux_hidden_state"),
    "no fc": (CONFIG, {name: one for name, one in own().items() if name != "fc.weight"}, "has no fc.weight"),
    "an eagle_config that is a list": (CONFIG | {"eagle_config": [1]}, own(), "eagle_config in the config"),
    "ids that are words": (
        CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}},
        own(),
        "eagle_aux_hidden_state_layer_ids in",
    ),
    "no hidden size": (
        {name: one for name, one in CONFIG.items() if name != "hidden_size"},
        own(),
        "hidden_size in the config",
    ),
    "a rope that is a word": ({**CONFIG, "rope_parameters": "yarn"}, own(), "rope_parameters in the config"),
    "projections that do not split": (
        CONFIG,
        own() | {"midlayer.self_attn.qkv_proj.weight": np.zeros((7, 2 * HIDDEN), ml_dtypes.bfloat16)},
        "7 rows, which do not split 4 : 2 : 2",
    ),
    "a vector for fc": (CONFIG, own() | {"fc.weight": np.zeros(HIDDEN, ml_dtypes.bfloat16)}, "has no fc.weight"),
    "a negative eps": (
        CONFIG | {"rms_norm_eps": -1e-5},
        own(),
        "rms_norm_eps in the config of .* is -1e-05",
    ),
    "a theta of 0": (
        {**CONFIG, "rope_parameters": {"rope_theta": 0}},
        own(),
        "rope_theta in .* is 0, not a number",
    ),
    "linear without a factor": (
        {**CONFIG, "rope_parameters": None, "rope_scaling": {"type": "linear"}},
        own(),
        "rope_scaling of the form linear has no factor",
    ),
    "no heads": (CONFIG | {"num_attention_heads": 0}, own(), "num_attention_heads in the config of .* is 0"),
    "fractions for ids": (CONFIG, own() | {"d2t": D2T.astype(np.float32)}, "d2t in .* is stored as float32"),
    "ids beyond the target's": (CONFIG, own() | {"d2t": D2T + 10**6}, r"makes 0 of \d+ target ids in range"),
    "no map": (CONFIG, {name: one for name, one in own().items() if name != "d2t"}, "there is no d2t in"),
    "no weights": (CONFIG, None, "the draft's weights are missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_class_cannot_express_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, tensors, why = REFUSED[name]
    draft = written(tmp_path / "draft", config, tensors or {})
    if tensors is None:
        (draft / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=why) as caught:
        read_head(draft)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_in_training_comes_with_the_command_that_exports_it(tmp_path: Path) -> None:
    (tmp_path / "training_state.pt").touch()
    assert HOST.takes(tmp_path)
    with pytest.raises(CheckpointError, match="specforge export --to sglang"):
        read_head(tmp_path)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", CONFIG, own())
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_head(draft)
