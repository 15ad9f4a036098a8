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
