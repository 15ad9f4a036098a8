"""`check` and `export` without `--engine`: the engine that a folder is for, and why it is taken for that one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.errors import CheckpointError, OutputExistsError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.checkpoint.purpose import purpose_of, purpose_of_export, write_for
from eagle_trace_analysis.engines import ENGINES, SGLANG
from tests.support import checkpoints as make
from tests.support import latent
from tests.support.check_cases import Folders, flat_config, named, write_healthy

VLLM = ENGINES["vllm"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def flat(folder: Path, healthy: Folders, **changes: Any) -> Path:
    return make.write_checkpoint(folder, flat_config(healthy) | changes, make.draft_tensors())


@pytest.mark.parametrize(
    ("architecture", "name", "why"),
    [
        ("LlamaForCausalLMEagle3", "sglang", "the config is flat"),
        ("Eagle3LlamaForCausalLM", "vllm", "vLLM alone has a class Eagle3LlamaForCausalLM"),
        ("Eagle3Qwen3ForCausalLM", "vllm", "vLLM alone has a class Eagle3Qwen3ForCausalLM"),
        ("SomethingElse", "sglang", "the config is flat"),
        (None, "sglang", "the config is flat"),
    ],
)
def test_a_flat_folder_is_for_the_engine_whose_class_it_names(
    architecture: str | None, name: str, why: str, healthy: Folders, tmp_path: Path
) -> None:
    draft = flat(tmp_path / "draft", healthy, architectures=[architecture] if architecture else None)
    found = purpose_of(draft)
    assert name == found.engine.NAME
    assert why in found.why


def test_check_says_for_which_engine_it_judged_and_why(healthy: Folders, tmp_path: Path) -> None:
    served = flat(tmp_path / "served", healthy)
    for draft, engine, why in (
        (healthy.draft, VLLM, "vLLM loads speculators format as it is"),
        (served, SGLANG, "the config is flat, which is SGLang's format"),
    ):
        for options in ((), ("--quiet",)):
            status, said = run("check", draft, "--target", healthy.target, *options)
            assert status == 0
            assert f"judged for {engine.ENGINE}: {why}; for another give --engine " in " ".join(said.split())
        data = json.loads(run("check", draft, "--format", "json")[1])
        assert data["engine"] == engine.ENGINE
        assert data["engine_chosen"].startswith(why)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_was_named_needs_no_reason(name: str, healthy: Folders) -> None:
    status, said = run("check", healthy.draft, "--target", healthy.target, "--engine", name)
    assert status == 0
    assert f"judged for {ENGINES[name].ENGINE}\n" in said
    assert "judged" not in run("check", healthy.draft, "--engine", name, "--quiet")[1]
    assert json.loads(run("check", healthy.draft, "--engine", name, "--format", "json")[1])["engine_chosen"] is None


def test_export_writes_for_the_engine_that_does_not_load_the_folder_as_it_is(healthy: Folders, tmp_path: Path) -> None:
    assert purpose_of_export(healthy.draft).engine is SGLANG
    status, said = run("export", healthy.draft, tmp_path / "sglang", "--target", healthy.target)
    assert status == 0
    assert f"for {SGLANG.ENGINE} (vLLM loads {healthy.draft} as it is)" in said
    status, said = run("export", tmp_path / "sglang", tmp_path / "vllm", "--target", healthy.target)
    assert status == 0
    assert f"for {VLLM.ENGINE} (SGLang loads {tmp_path / 'sglang'} as it is)" in said


def test_a_draft_in_sglangs_format_is_written_for_vllm_as_it_was_trained(healthy: Folders, tmp_path: Path) -> None:
    served, back = tmp_path / "sglang", tmp_path / "vllm"
    write_for(SGLANG, healthy.draft, served, target=healthy.target)
    write_for(VLLM, served, back, target=healthy.target)
    result = check(back, target=healthy.target, reference=healthy.draft, engine=VLLM)
    assert [one.name for one in result.findings if one.status is Status.FAIL] == []
    assert json.loads((back / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == make.TRAINED_IDS
    # the target's embedding is shared, so it is left out; everything else is the same to the bit
    assert {(one.name, one.change) for one in result.changes} <= {("embed_tokens.weight", "gone")}


def test_what_cannot_be_written_for_vllm_is_said_in_a_sentence(healthy: Folders, tmp_path: Path) -> None:
    served, own = flat(tmp_path / "served", healthy), tmp_path / "own"
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"is in SGLang's format: give --target"):
        write_for(VLLM, served, out)
    write_for(VLLM, healthy.draft, own, target=healthy.target)
    with pytest.raises(CheckpointError, match="is in vLLM's format already: there is nothing to export"):
        write_for(VLLM, own, out, target=healthy.target)
    quantised = flat(tmp_path / "quantised", healthy, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="cannot be written in speculators format: its weights are quantised"):
        write_for(VLLM, quantised, out, target=healthy.target)
    with pytest.raises(CheckpointError, match="cannot be written in speculators format: its attention is latent"):
        write_for(VLLM, latent.write_draft(tmp_path / "latent"), out, target=healthy.target)
    out.mkdir()
    (out / "file").write_text("")
    with pytest.raises(OutputExistsError):
        write_for(VLLM, served, out, target=healthy.target)


def test_of_a_quantised_draft_vllm_is_said_not_to_be_known(healthy: Folders, tmp_path: Path) -> None:
    changes = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    draft = flat(tmp_path / "draft", healthy, architectures=["Eagle3LlamaForCausalLM"], **changes)
    found = named(check(draft, target=healthy.target, engine=VLLM), "quantisation")
    assert found.status is Status.SKIP
    assert found.evidence == (
        f"not checked: the draft is quantised, and what {VLLM.ENGINE} loads under fp8 is not known here"
    )


def test_ids_that_one_runner_of_vllm_does_not_read_are_warned_of(healthy: Folders, tmp_path: Path) -> None:
    ids = [1, 8, 20]
    inside = {"architectures": ["Eagle3LlamaForCausalLM"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    found = named(check(flat(tmp_path / "a", healthy, **inside), target=healthy.target, engine=VLLM), "layer-ids")
    assert (found.status, found.cause) == (Status.WARN, "layer-ids-ignored")
    assert f"feeds the inputs of layers {make.TRAINED_IDS} instead of {ids}" in found.evidence
    assert "move the ids to eagle_aux_hidden_state_layer_ids at the top" in found.fix
    # what the runner takes by default, or reads, is no matter
    for name, changes in (
        ("b", inside | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": make.TRAINED_IDS}}),
        ("c", inside | {"eagle_aux_hidden_state_layer_ids": ids}),
    ):
        found = named(check(flat(tmp_path / name, healthy, **changes), target=healthy.target, engine=VLLM), "layer-ids")
        assert found.cause != "layer-ids-ignored"


def test_vllm_keeps_an_embedding_of_the_drafts_own(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    tensors["embed_tokens.weight"] = (tensors["embed_tokens.weight"].astype("float32") * 2).astype("bfloat16")
    draft = make.write_checkpoint(tmp_path / "draft", flat_config(healthy), tensors)
    said = {
        engine.NAME: named(check(draft, target=healthy.target, engine=engine), "embedding") for engine in (SGLANG, VLLM)
    }
    assert (said["sglang"].status, said["vllm"].status) == (Status.FAIL, Status.PASS)
    assert said["vllm"].evidence == "vLLM keeps the draft's own where it is not the target's"
