"""Layer ids that look copied from the other convention: said of the folder they are in, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import Finding, Status
from eagle_trace_analysis.engines.sglang import engine
from tests.support import checkpoints as make
from tests.support.check_cases import Folders, flat_config, named, write_healthy


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


def write_target(folder: Path, layers: int, architecture: str = "LlamaForCausalLM") -> Path:
    config = make.decoder_config(layers) | {"architectures": [architecture]}
    return make.write_checkpoint(folder, config, make.target_tensors())


def write_trained(folder: Path, ids: list[int] | None) -> Path:
    config = make.speculators_config() | {"eagle_aux_hidden_state_layer_ids": ids}
    return make.write_checkpoint(folder, config, make.draft_tensors())


def write_served(folder: Path, healthy: Folders, ids: list[int]) -> Path:
    config = flat_config(healthy)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    return make.write_checkpoint(folder, config, make.draft_tensors())


def layer_ids(draft: Path, **options: Any) -> Finding:
    return named(check(draft, **options), "layer-ids")


#: number of layers, class, trained ids, what is said
TRAINED = [
    (30, "LlamaForCausalLM", [2, 15, 27], Status.PASS),
    (30, "LlamaForCausalLM", [1, 14, 26], Status.WARN),
    (94, "Qwen3MoeForCausalLM", [1, 46, 90], Status.WARN),
    (94, "Qwen3MoeForCausalLM", [2, 47, 91], Status.PASS),
    (94, "Qwen3MoeForCausalLM", [1, 46, 89], Status.PASS),
    (61, "DeepseekV3ForCausalLM", [1, 29, 57], Status.WARN),
    (61, "DeepseekV3ForCausalLM", [2, 30, 58], Status.PASS),
    (61, "KimiK25ForConditionalGeneration", [1, 29, 57], Status.WARN),
    (36, "GptOssForCausalLM", [1, 17, 32], Status.WARN),
    (36, "GptOssForCausalLM", [2, 18, 33], Status.PASS),
]


@pytest.mark.parametrize(("layers", "architecture", "ids", "status"), TRAINED)
def test_a_speculators_config_with_the_serving_default_is_doubted(
    tmp_path: Path, layers: int, architecture: str, ids: list[int], status: Status
) -> None:
    target = write_target(tmp_path / "target", layers, architecture)
    finding = layer_ids(write_trained(tmp_path / "draft", ids), target=target)
    assert finding.status is status, finding
    if status is Status.WARN:
        assert "look copied from a serving config" in finding.evidence
        assert str(engine.default_inputs(layers)) in finding.fix


@pytest.mark.parametrize(("layers", "architecture", "ids", "status"), TRAINED)
def test_export_warns_of_the_same_ids_and_writes_what_was_asked_for(
    tmp_path: Path, layers: int, architecture: str, ids: list[int], status: Status
) -> None:
    target = write_target(tmp_path / "target", layers, architecture)
    warnings = export(write_trained(tmp_path / "draft", ids), tmp_path / "out", target=target)
    assert len(warnings) == (status is Status.WARN)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert engine.captured_inputs(written, layers, architecture) == ids


def test_without_a_target_the_number_of_layers_is_taken_from_the_ids(healthy: Folders, tmp_path: Path) -> None:
    said = layer_ids(write_trained(tmp_path / "a", [1, 46, 90]))
    assert said.status is Status.WARN
    assert "for 94 layers" in said.evidence
    assert export(tmp_path / "a", tmp_path / "out")
    said = layer_ids(write_served(tmp_path / "b", healthy, [2, 47, 91]))
    assert said.status is Status.WARN
    assert "[1, 46, 90]" in said.fix
    for ids in ([1, 46, 90], [1, 14, 26], [0, 1, 2], [5]):
        served = write_served(tmp_path / str(ids), healthy, ids)
        assert layer_ids(served).status is Status.SKIP, ids
    assert layer_ids(write_trained(tmp_path / "c", [3, 20, 40])).status is Status.PASS


@pytest.mark.parametrize(
    ("served", "trained", "status", "words"),
    [
        # the reference's ids are the serving default: it is the doubtful one, whatever the draft says
        ([1, 14, 26], [1, 14, 26], Status.WARN, "in the reference"),
        ([0, 13, 25], [1, 14, 26], Status.WARN, "in the reference"),
        # the draft's ids are speculators' default: here the draft is the copied one
        ([2, 15, 27], [2, 15, 27], Status.FAIL, "copied as they are"),
        ([1, 14, 26], [2, 15, 27], Status.PASS, "as trained"),
        ([3, 9, 19], [4, 10, 20], Status.PASS, "as trained"),
        ([4, 10, 20], [4, 10, 20], Status.FAIL, "copied as they are"),
    ],
)
def test_of_draft_and_reference_the_copied_one_is_named(
    healthy: Folders, tmp_path: Path, served: list[int], trained: list[int], status: Status, words: str
) -> None:
    draft = write_served(tmp_path / "draft", healthy, served)
    reference = write_trained(tmp_path / "reference", trained)
    for options in ({"target": healthy.target}, {}):
        finding = layer_ids(draft, reference=reference, **options)
        assert (finding.status, words in finding.evidence) == (status, True), finding


@pytest.mark.parametrize("architecture", sorted(engine.SHIFT_IF_FIRST_IS_1))
def test_layers_that_begin_with_one_have_a_list_for_deepseeks_kin(tmp_path: Path, architecture: str) -> None:
    ids = engine.ids_that_capture([1, 2, 4], 6, architecture)
    assert ids == [2, 1, 4]
    target = write_target(tmp_path / "target", 6, architecture)
    draft = write_trained(tmp_path / "draft", [1, 2, 4])
    export(draft, tmp_path / "out", target=target)
    assert layer_ids(tmp_path / "out", target=target, reference=draft).status is Status.PASS


def test_the_one_class_with_default_layers_of_its_own_is_known() -> None:
    assert engine.captured_inputs({}, 30, "MiniMaxM3SparseForConditionalGeneration") == [3, 16, 28]
    assert engine.captured_inputs({}, 30, "MiniMaxM3SparseForCausalLM") == [2, 15, 27]
