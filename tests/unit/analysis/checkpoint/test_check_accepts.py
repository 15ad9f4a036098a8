"""Configs that the engine's own loader stops at: one finding that names the key; and those it takes: no word.

`tests/integration/test_engine_judge.py` holds the whole table against the engine; these are the findings made of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import CheckResult, Status
from eagle_trace_analysis.engines.sglang import accepts
from tests.support import checkpoints as make
from tests.support.check_cases import Folders, flat_config, named, only, troubles, write_healthy
from tests.support.config_cases import ACCEPTED, NAMED, OTHERWISE, REFUSED


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


def checked(folder: Path, healthy: Folders, changes: dict[str, Any], without: tuple[str, ...] = ()) -> CheckResult:
    config = {key: value for key, value in (flat_config(healthy) | changes).items() if key not in without}
    return check(make.write_checkpoint(folder, config, make.draft_tensors()), target=healthy.target)


@pytest.mark.parametrize(("changes", "words", "fix"), REFUSED, ids=[json.dumps(case[0])[:60] for case in REFUSED])
def test_a_value_that_the_engine_stops_at_is_one_finding_with_the_key_and_what_is_wanted(
    healthy: Folders, tmp_path: Path, changes: dict[str, Any], words: str, fix: str
) -> None:
    result = checked(tmp_path, healthy, changes)
    finding = named(result, "config")
    assert finding.status is Status.FAIL
    assert words in finding.evidence
    assert fix in finding.fix
    assert [f.name for f in result.findings if f.status is Status.FAIL] == ["config"]


def test_a_config_without_a_model_type_fails(healthy: Folders, tmp_path: Path) -> None:
    assert "no model_type" in only(checked(tmp_path, healthy, {}, ("model_type",)), "config").evidence


@pytest.mark.parametrize("key", accepts.SIZES[:4])
def test_without_a_size_nothing_else_is_checked_and_that_is_said(healthy: Folders, tmp_path: Path, key: str) -> None:
    result = checked(tmp_path, healthy, {key: None})
    assert key in only(result, "config").fix
    assert named(result, "everything else").status is Status.SKIP


@pytest.mark.parametrize("changes", ACCEPTED, ids=[json.dumps(changes)[:60] for changes in ACCEPTED])
def test_a_value_that_the_engine_takes_raises_no_alarm(
    healthy: Folders, tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert troubles(checked(tmp_path, healthy, changes)) == {}


@pytest.mark.parametrize(
    "kind",
    [
        name
        for name, entry in accepts.table()["classes"].items()
        if entry["loads"] and name not in ("llama", *OTHERWISE)
    ],
)
def test_another_model_type_is_judged_by_the_tensors(healthy: Folders, tmp_path: Path, kind: str) -> None:
    result = checked(tmp_path, healthy, NAMED | {"model_type": kind})
    assert troubles(result) == {}
    assert kind in named(result, "decoder-layer").evidence


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_model_type_that_computes_otherwise_though_all_is_named_is_told(
    healthy: Folders, tmp_path: Path, kind: str
) -> None:
    name, words = OTHERWISE[kind]
    result = checked(tmp_path, healthy, NAMED | {"model_type": kind})
    assert name in troubles(result)
    assert words in named(result, name).evidence


@pytest.mark.parametrize(
    ("kind", "without", "words"),
    [
        ("phi3", ("rms_norm_eps",), "rms_norm_eps 1e-05 (llama 1e-06)"),
        ("qwen3", ("rms_norm_eps",), ""),
        ("gpt_oss", ("rope_parameters",), "rope_theta 150000.0 (llama 10000.0), rope_type yarn (llama default)"),
        ("minimax_m2", ("rope_parameters",), "rope_theta 5000000.0"),
        ("mistral", ("rope_parameters", "rms_norm_eps"), ""),
    ],
)
def test_a_default_that_model_type_picks_is_warned_of_where_it_differs_from_llamas(
    healthy: Folders, tmp_path: Path, kind: str, without: tuple[str, ...], words: str
) -> None:
    result = checked(tmp_path, healthy, NAMED | {"model_type": kind}, without)
    assert named(result, "decoder-layer").status is (Status.WARN if words else Status.PASS)
    assert words in named(result, "decoder-layer").evidence


def test_a_class_that_builds_no_llama_layer_and_one_not_known_are_told_apart(healthy: Folders, tmp_path: Path) -> None:
    assert "gemma3_text" in only(checked(tmp_path / "a", healthy, {"model_type": "gemma3_text"}), "config").evidence
    unknown = named(checked(tmp_path / "b", healthy, {"model_type": "gpt2"}), "config")
    assert unknown.status is Status.SKIP
    assert "gpt2" in unknown.evidence


@pytest.mark.parametrize(
    "name",
    ["Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"],
)
def test_a_draft_under_vllms_name_is_told_so_and_checked_all_the_same(
    healthy: Folders, tmp_path: Path, name: str
) -> None:
    finding = only(checked(tmp_path / "a", healthy, {"architectures": [name]}), "format")
    assert "vLLM's name" in finding.evidence
    assert "LlamaForCausalLMEagle3" in finding.fix
    # ids that vLLM reads, at the top level or not, count inputs
    assert "are vLLM's too, which are inputs of layers, write [0, 13, 25]" in finding.fix
    tied = troubles(checked(tmp_path / "b", healthy, {"architectures": [name], "tie_word_embeddings": True}))
    assert set(tied) == {"format", "tied-head"}


def test_a_null_in_the_trained_config_is_left_out_of_the_export_and_a_wrong_type_refused(tmp_path: Path) -> None:
    config = make.speculators_config()
    config["transformer_layer_config"] |= {"attention_bias": None, "initializer_range": None, "pad_token_id": None}
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    assert troubles(check(draft)) == {}
    export(draft, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert not {"attention_bias", "initializer_range"} & set(written)
    assert not accepts.refusals(written)
    config["transformer_layer_config"]["initializer_range"] = 1
    make.write_checkpoint(draft, config, make.draft_tensors())
    assert "initializer_range" in only(check(draft), "config").evidence
    with pytest.raises(CheckpointError, match=r"would stop at the config.*initializer_range is 1"):
        export(draft, tmp_path / "other")


def test_a_draft_without_a_head_of_its_own_may_take_the_targets(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy) | {"draft_vocab_size": None}
    tensors = {
        name: value for name, value in make.draft_tensors().items() if name not in ("lm_head.weight", "d2t", "t2d")
    }
    result = check(make.write_checkpoint(tmp_path / "a", config, tensors), target=healthy.target)
    assert troubles(result) == {}
    assert "the engine gives it the target's" in named(result, "vocabulary").evidence
    # with a head of its own it would lose it
    result = check(make.write_checkpoint(tmp_path / "b", config, make.draft_tensors()), target=healthy.target)
    assert named(result, "vocabulary").status is Status.FAIL


def test_positions_short_of_the_targets_say_that_the_engine_does_not_start_with_its_length(
    healthy: Folders, tmp_path: Path
) -> None:
    finding = named(checked(tmp_path, healthy, {"max_position_embeddings": 2048}), "max-position")
    assert finding.status is Status.WARN
    assert "does not start" in finding.evidence
    assert "--context-length 2048" in finding.fix
    # keys that count positions ahead of it, and a factor that multiplies them
    assert accepts.positions({"max_position_embeddings": 2048, "max_seq_len": 4096}) == 4096
    assert (
        accepts.positions({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}}) == 4096
    )
    assert accepts.positions({"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 2.0}}) == 2048
