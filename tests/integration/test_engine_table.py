"""Our tables of what the engine loads, held against the installed SGLang's own class and target classes.

The class is built on torch's meta device in a process of its own (SGLang keeps its state for the life of a process);
no engine is started and no weight is made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis.engines.sglang import engine
from eagle_trace_analysis.engines.sglang import latent as tables
from tests.support import checkpoints as make
from tests.support import latent
from tests.support.own_process import run_module
from tests.support.warm.start import Warm

pytest.importorskip("sglang")
pytestmark = pytest.mark.integration

FLAT = make.decoder_config(1) | {
    "draft_vocab_size": make.DRAFT_VOCABULARY,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": FLAT,
    "tied": FLAT | {"tie_word_embeddings": True},
    "two layers": FLAT | {"num_hidden_layers": 2},
    "norm before fc": FLAT | {"norm_before_fc": True},
    "fc norm": FLAT | {"fc_norm": True},
    "legacy fc norm": FLAT | {"use_aux_norm": True},
    "four features": FLAT | {"num_aux_hidden_states": 4},
    "other width": FLAT | {"target_hidden_size": 80},
    "attention bias": FLAT | {"attention_bias": True},
    "bias": FLAT | {"bias": True},
    "no head_dim": {key: value for key, value in FLAT.items() if key != "head_dim"},
}
NAMES = [
    *make.draft_tensors(),
    *(name.replace("layers.0.", "midlayer.") for name in make.draft_tensors()),
    *(f"model.{name}" for name in make.draft_tensors()),
    "layers.0.self_attn.qkv_proj.weight",
    "layers.0.self_attn.q_proj.bias",
    "layers.0.self_attn.q_norm.weight",
    "layers.1.mlp.down_proj.weight",
    "decoder.mlp.up_proj.weight",
    "input_norm.weight",
    "fc_norm.2.weight",
    "aux_norm_low.weight",
    "model.model.fc.weight",
    "verifier_norm.weight",
    "draft.d2t",
    "eagle3.t2d",
    "my_midlayer.weight",
    "layers.0.midlayer_x.weight",
    "model.midlayer.mlp.down_proj.weight",
]
LATENT: dict[str, dict[str, Any]] = {
    "plain": latent.draft_config(),
    "tied": latent.draft_config(tie_word_embeddings=True),
    "fc norm": latent.draft_config(fc_norm=True),
    "bias": latent.draft_config(bias=True),
    "biases": latent.draft_config(attention_bias=True),
    "four features": latent.draft_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}),
    "ids at the top": latent.draft_config(eagle_config={}, eagle_aux_hidden_state_layer_ids=[1, 2]),
    "other width": latent.draft_config(target_hidden_size=80),
    "defaults": latent.draft_config(q_lora_rank=None, kv_lora_rank=None, v_head_dim=None, rope_scaling=latent.YARN),
    "whole vocabulary": latent.draft_config(draft_vocab_size=None),
    "two layers": latent.draft_config(num_hidden_layers=2),
    "no rank": latent.draft_config() | {"q_lora_rank": None},
}
_PARTS = [f"{latent.ATTENTION}.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
_STORED = [name for name in latent.draft_tensors(latent.draft_config()) if name not in _PARTS]
LATENT_NAMES = [
    *_STORED,
    *(name.replace("layers.0.", "midlayer.") for name in _STORED if name.startswith("layers.0.")),
    *(f"model.{name}" for name in _STORED),
    f"{latent.ATTENTION}.fused_qkv_a_proj_with_mqa.weight",
    f"{latent.ATTENTION}.q_proj.weight",
    "layers.0.mlp.gate_up_proj.weight",
    "layers.0.mlp.up_proj.bias",
    "layers.1.mlp.down_proj.weight",
    "embed_tokens.weight",
    "input_norm.weight",
    "fc.bias",
    "fc_norm.2.weight",
    "aux_norm_low.weight",
    "draft.d2t",
    "my_d2t",
    "eagle3.t2d",
    "my_midlayer.weight",
]
#: what is fused on load is loaded where both are there
TOGETHER = " ".join(_PARTS)
TARGETS = [
    ("llama", "LlamaForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("deepseek_v2", "DeepseekV3ForCausalLM"),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
]
IDS = [None, [1, 14, 26], [2, 15, 27], [4, 15, 30]]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probe")
    cases = [{"config": config, "names": NAMES, "latent": False} for config in CONFIGS.values()]
    cases += [{"config": config, "names": [*LATENT_NAMES, TOGETHER], "latent": True} for config in LATENT.values()]
    out = folder / "out.json"
    model = make.write_checkpoint(folder / "model", make.decoder_config(1), make.target_tensors())
    job = {
        "model": str(model),
        "cases": cases,
        "targets": TARGETS,
        "ids": IDS,
        "store": str(folder / "store"),
        "out": str(out),
    }
    (folder / "job.json").write_text(json.dumps(job))
    with warm():
        run_module("tests.support.engine_probe", folder / "job.json")
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


def unfused(shapes: dict[str, list[int]], config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """SGLang's parameters under speculators' names, its vocabularies without the padding."""
    full = {"draft_vocab_size": config["vocab_size"], **engine.with_defaults(config)}
    queries, keys = (full[key] * full["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        name = name.removeprefix("model.")
        if "qkv_proj" in name:
            assert shape[0] == queries + 2 * keys
            for part, rows in zip("qkv", (queries, keys, keys), strict=True):
                out[name.replace("qkv_proj", f"{part}_proj")] = (rows, *shape[1:])
        elif "gate_up_proj" in name:
            for part in ("gate_proj", "up_proj"):
                out[name.replace("gate_up_proj", part)] = (shape[0] // 2, *shape[1:])
        elif name in ("lm_head.weight", "embed_tokens.weight"):
            own = full["draft_vocab_size" if name == "lm_head.weight" else "vocab_size"]
            assert own <= shape[0] < own + 64
            out[name] = (own, *shape[1:])
        else:
            out[name] = tuple(shape)
    return out


@pytest.mark.parametrize("case", CONFIGS)
def test_table_of_parameters_is_the_classes_own(probe: dict[str, Any], case: str) -> None:
    answer = probe["answers"][list(CONFIGS).index(case)]
    assert engine.parameters(CONFIGS[case]) == unfused(answer["shapes"], CONFIGS[case])


@pytest.mark.parametrize("case", CONFIGS)
def test_names_land_where_the_class_puts_them(probe: dict[str, Any], case: str) -> None:
    known = engine.parameters(CONFIGS[case])
    loaded = probe["answers"][list(CONFIGS).index(case)]["loaded"]
    for name in NAMES:
        if engine.canonical_name(name) == "t2d":
            assert loaded[name] is None
            continue
        places = engine.destinations(name, known)
        assert bool(places) == (loaded[name] is not None), name
        if places == ("d2t",):
            assert loaded[name] == ["d2t", None]
        elif places:
            host, shard = loaded[name]
            fused = host.removeprefix("model.").split(".")[-2]
            parts = engine.STACKED.get(fused, ())
            if shard is None:
                assert len(places) == (len(parts) or 1)
            else:
                part = "qkv".index(shard) if isinstance(shard, str) else shard
                assert places == (host.removeprefix("model.").replace(fused, parts[part]),)


def unfused_latent(shapes: dict[str, list[int]], config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same of the class with latent attention."""
    ranks = [config.get("q_lora_rank", 1536), config.get("kv_lora_rank", 512) + config["qk_rope_head_dim"]]
    out = unfused({name: shape for name, shape in shapes.items() if "fused_qkv_a" not in name}, config)
    for name, shape in shapes.items():
        if "fused_qkv_a" in name:
            assert shape[0] == sum(ranks)
            for part, rows in zip(("q_a_proj", "kv_a_proj_with_mqa"), ranks, strict=True):
                out[name.replace("fused_qkv_a_proj_with_mqa", part)] = (rows, *shape[1:])
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): shape for name, shape in out.items()}


@pytest.mark.parametrize("case", LATENT)
def test_tables_of_latent_attention_are_the_classes_own(probe: dict[str, Any], case: str) -> None:
    config = LATENT[case]
    answer = probe["answers"][len(CONFIGS) + list(LATENT).index(case)]
    refused = [one for one in tables.refusals(config) if one.key != "dtype"]
    assert bool(refused) == ("refused" in answer), answer.get("refused", refused)
    if refused:
        return
    known = tables.parameters(config)
    assert known == unfused_latent(answer["shapes"], config)
    for name in LATENT_NAMES:
        places, landed = tables.destinations(name, known), answer["loaded"][name]
        if places in ((), ("t2d",)):
            assert landed is None, name
        elif places == ("d2t",):
            assert landed == ["d2t", None]
        else:
            held = landed[0].removeprefix("model.").replace("midlayer.", "layers.0.")
            parts = [held.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
            assert places == (tuple(parts) if landed[1] is None and "gate_up" in held else (parts[landed[1] or 0],))
    assert answer["loaded"][TOGETHER] == ["model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight", None]


@pytest.mark.parametrize("target", [name for _, name in TARGETS])
def test_layer_ids_mean_what_the_target_class_captures(probe: dict[str, Any], target: str) -> None:
    for given, captured in zip(IDS, probe["ids"][target], strict=True):
        own = {} if given is None else {"eagle_aux_hidden_state_layer_ids": given}
        assert engine.captured_inputs({"eagle_config": own}, 30, target) == captured


def test_recorded_params_match_when_a_serve_trace_is_given() -> None:
    """A real recording (EAGLE_TRACE_SERVE_TRACE names one) loaded exactly the parameters of the table."""
    given = os.environ.get("EAGLE_TRACE_SERVE_TRACE")
    if not given:
        pytest.skip("set EAGLE_TRACE_SERVE_TRACE to a sealed serve trace")
    import pandas as pd

    params = pd.read_parquet(Path(given) / "params.parquet")
    draft = json.loads((Path(given) / "manifest.json").read_text())["draft"]
    assert set(params["canonical_name"]) - {"d2t"} == set(engine.parameters(draft["config"]))
