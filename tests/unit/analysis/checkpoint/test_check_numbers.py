"""Numbers of a config that enter a computation: those that make it no computation fail, and the key is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines import ENGINES, SGLANG
from tests.support import checkpoints as make
from tests.support import latent, rope_numbers
from tests.support.check_cases import Folders, flat_config, named, write_healthy

NAN, INF = float("nan"), float("inf")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def served(folders: Folders) -> Path:
    """The deployed draft, without a word of how it was trained."""
    return make.write_checkpoint(folders.flat.parent / "served", flat_config(folders), make.draft_tensors())


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent.write_draft(tmp_path_factory.mktemp("latent") / "draft")


@pytest.mark.parametrize(
    ("scaling", "status", "words"),
    [
        (YARN, Status.SKIP, "deepseek_yarn"),
        (YARN | {"factor": 0.0}, Status.FAIL, "factor is 0.0"),
        (YARN | {"factor": -4.0}, Status.FAIL, "factor is -4.0"),
        (YARN | {"factor": NAN}, Status.FAIL, "factor is NaN"),
        (YARN | {"original_max_position_embeddings": 1e300}, Status.FAIL, "original_max_position_embeddings is 1e+300"),
        (YARN | {"mscale_all_dim": 1e30}, Status.FAIL, "mscale_all_dim is 1e+30"),
        (YARN | {"mscale": INF}, Status.FAIL, "mscale is Infinity"),
        (YARN | {"beta_fast": -1}, Status.FAIL, "beta_fast is -1"),
        (YARN | {"beta_fast": 1, "beta_slow": 32}, Status.WARN, "beta_fast is 1, beta_slow 32"),
        (YARN | {"beta_fast": 1, "beta_slow": 1}, Status.SKIP, "deepseek_yarn"),
        ({**YARN, "type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
         Status.FAIL, "factor is 0.0 for a rotary embedding of the form deepseek_yarn"),
        ({**YARN, "type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, Status.WARN, "the form llama3"),
        ({**YARN, "type": "linear"}, Status.WARN, "names the form linear"),
    ],
)  # fmt: skip
def test_a_latent_drafts_scaling_is_judged_by_the_yarn_that_its_class_makes_of_it(
    scaling: dict[str, Any], status: Status, words: str, mla: Path
) -> None:
    (mla / "config.json").write_text(json.dumps(latent.draft_config(rope_scaling=scaling)))
    found = named(check(mla), "rope")
    assert (found.status, words in found.evidence) == (status, True), found.evidence


DEEPSEEK = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
#: published configs' base, positions and scaling, which drafts copy
PUBLISHED: dict[str, tuple[float, int, dict[str, Any]]] = {
    "Llama-3.1": (500000.0, 131072, LLAMA),
    "Llama-3.2": (500000.0, 131072, LLAMA | {"factor": 32.0}),
    "Qwen2.5": (1000000.0, 32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "Qwen3": (1000000, 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "DeepSeek-V3": (10000, 163840, DEEPSEEK),
    "Kimi-K2": (50000.0, 131072, DEEPSEEK | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}),
    "Kimi-K2-0905": (50000.0, 262144, DEEPSEEK | {"factor": 64.0, "beta_fast": 1.0, "beta_slow": 1.0}),
    "gpt-oss": (150000, 131072, {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    }),
    "Phi-3.5": (10000.0, 131072, {"type": "longrope", "short_factor": [1.0, 1.02], "long_factor": [1.08, 64.0]}),
    "deepseek-coder": (100000, 16384, {"type": "linear", "factor": 4.0}),
    "InternLM2": (1000000, 32768, {"type": "dynamic", "factor": 2.0}),
    "no scaling": (10000.0, 4096, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "engine"),
    [(model, engine) for model in PUBLISHED for engine in ENGINES]
    + [(model, "latent") for model, (_, _, scaling) in PUBLISHED.items() if "mscale" in scaling],
)
def test_a_published_scaling_neither_fails_nor_warns(
    model: str, engine: str, served: Path, mla: Path, folders: Folders
) -> None:
    theta, positions, scaling = PUBLISHED[model]
    changes = {"rope_theta": theta, "max_position_embeddings": positions, "rope_scaling": scaling or None}
    if engine == "latent":
        (mla / "config.json").write_text(json.dumps(latent.draft_config(**changes)))
        found = named(check(mla), "rope")
    else:
        config = {key: value for key, value in flat_config(folders).items() if key != "rope_parameters"} | changes
        if scaling.get("type") == "longrope":
            config["original_max_position_embeddings"] = 4096
            pairs = config["head_dim"] // 2
            config["rope_scaling"] = scaling | {
                key: [value[0], *[value[1]] * (pairs - 1)] for key, value in scaling.items() if key != "type"
            }
        (served / "config.json").write_text(json.dumps(config))
        found = named(check(served, engine=ENGINES[engine]), "rope")
    assert found.status is Status.SKIP, found.evidence


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("theta", [0.0, -1e4, NAN, 1e-300])
def test_a_base_without_a_rotation_fails(theta: float, engine: Any, served: Path, folders: Folders) -> None:
    (served / "config.json").write_text(
        json.dumps(flat_config(folders) | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}})
    )
    found = named(check(served, engine=engine), "rope")
    assert found.status is Status.FAIL
    assert found.evidence.startswith("rope_theta is ")
    assert found.fix == "set rope_theta as trained"


@pytest.mark.parametrize(("engine", "status"), [("sglang", Status.WARN), ("vllm", Status.FAIL)])
def test_a_share_that_is_none_stops_vllm(engine: str, status: Status, served: Path, folders: Folders) -> None:
    (served / "config.json").write_text(json.dumps(flat_config(folders) | {"partial_rotary_factor": 1.5}))
    assert named(check(served, engine=ENGINES[engine]), "rope").status is status


@pytest.mark.parametrize(
    ("eps", "status"),
    [
        (1e-6, Status.SKIP), (1e-12, Status.SKIP), (0.0, Status.WARN), (1e-60, Status.WARN), (0.1, Status.WARN),
        (1e30, Status.WARN), (1e60, Status.FAIL), (INF, Status.FAIL), (NAN, Status.FAIL), (-1e-6, Status.FAIL),
    ],
)  # fmt: skip
def test_an_eps_is_one_that_a_norm_computes_with_in_float32(
    eps: float, status: Status, served: Path, folders: Folders
) -> None:
    (served / "config.json").write_text(json.dumps(flat_config(folders) | {"rms_norm_eps": eps}))
    assert named(check(served), "norm-eps").status is status


def test_heads_that_cannot_share_key_value_heads_fail(folders: Folders, tmp_path: Path) -> None:
    config, tensors = flat_config(folders), make.draft_tensors()
    config |= {"num_key_value_heads": 3, "num_attention_heads": 4}
    for part in "kv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = tensors["layers.0.self_attn.q_proj.weight"][: 3 * config["head_dim"]]
    found = named(check(make.write_checkpoint(tmp_path / "draft", config, tensors)), "head-shape")
    assert found.status is Status.FAIL
    assert "do not divide" in found.evidence


def test_the_key_that_is_named_is_the_one_that_does_it() -> None:
    faults = 0
    for cell, config in rope_numbers.cells():
        tables = SGLANG.other_class(config) or SGLANG
        fault = tables.rotation_fault(tables.with_defaults(config)) if not tables.refusals(config) else None
        if fault is not None:
            faults += 1
            assert cell.split(", ")[-1].split(" ")[0] in fault.fix, cell
    assert faults > 200
