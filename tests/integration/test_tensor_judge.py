"""The check's word on odd tensors and files, held against the installed SGLang's own loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines.sglang import engine, kinds, schemes
from tests.support import checkpoints as make
from tests.support.published_cases import PUBLISHED
from tests.support.quantised_cases import QUANTISED
from tests.support.quantised_forms import METHODS
from tests.support.tensor_cases import CASES, FINE, PARTLY, REFUSES, UNBUILT, Case, Write, flat
from tests.support.tensor_judge import ask
from tests.support.warm.start import Warm

pytest.importorskip("sglang")
pytestmark = pytest.mark.integration


def saved(name: str = "pytorch_model.bin", **how: Any) -> Write:
    """The healthy draft as torch saves it, with a matrix that lies transposed in the file."""

    def write(path: Path) -> None:
        from tests.support import torch_files

        turned = torch_files.STATE["fc.weight"].t().contiguous().t()
        torch_files.write(path, {**torch_files.STATE, "fc.weight": turned, "epoch": 3}, name, **how)

    return write


def sharded(*, all_there: bool) -> Write:
    def write(path: Path) -> None:
        from tests.support import torch_files

        names = list(torch_files.STATE)
        first = {name: one for name, one in torch_files.STATE.items() if name != "fc.weight"}
        torch_files.write(path, first, "pytorch_model-1.bin")
        torch_files.write(path, {"lr": 0.1}, "training_args.bin")
        if all_there:
            torch_files.write(path, {"fc.weight": torch_files.STATE["fc.weight"]}, "pytorch_model-2.bin")
        weight_map = dict.fromkeys(names, "pytorch_model-2.bin")
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def nested(path: Path) -> None:
    from tests.support import torch_files

    torch_files.write(path, {"model": dict(torch_files.STATE)})


def unsafe(path: Path) -> None:
    from tests.support import torch_files

    torch_files.write(path, {**torch_files.STATE, "path": Path("/")})


SAVED = [
    Case("bin", saved()),
    Case("bin of an old torch", saved(_use_new_zipfile_serialization=False)),
    Case("pt", saved("draft.pt")),
    Case("bin in two shards", sharded(all_there=True)),
    Case("bin with a shard missing", sharded(all_there=False), PARTLY, "weights-present"),
    Case("bin that holds the weights deeper", nested, PARTLY, "unreadable"),
    Case("bin that would run code", unsafe, REFUSES, "unreadable"),
]
ALL = [case for case in (*CASES, *QUANTISED, *PUBLISHED, *SAVED) if case.engine != UNBUILT]
Verdicts = dict[str, tuple[Path, dict[str, Any]]]
#: left at its start and never applied, or applied as ones
IDLE = ("model.fc.", "model.layers.0.hidden_norm.")


def unfused(module: str) -> list[str]:
    fused = next((one for one in engine.STACKED if module.endswith(one)), None)
    return [module.replace(fused, part) for part in engine.STACKED[fused]] if fused else [module]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("judge")
    model = make.write_checkpoint(root / "model", make.decoder_config(1), make.target_tensors())
    folders = []
    for number, case in enumerate(ALL):
        folders.append(root / str(number))
        case.write(folders[-1])
    with warm():
        return ask(root / "exchange", model, folders) | {"folders": folders}


@pytest.fixture(scope="module")
def verdicts(judged: dict[str, Any]) -> Verdicts:
    found = zip(ALL, judged["folders"], judged["verdicts"], strict=True)
    return {case.name: (path, one) for case, path, one in found}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_engine_does_what_the_case_says(verdicts: Verdicts, case: Case) -> None:
    _, verdict = verdicts[case.name]
    if case.engine == REFUSES:
        assert verdict["error"]
        return
    assert verdict["error"] is None
    unset = [name for name in verdict["unset"] if not (name.startswith(IDLE) and case.engine == FINE)]
    assert bool(unset or verdict["dropped"]) == (case.engine == PARTLY), verdict


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_what_the_engine_refuses_or_leaves_at_its_start_never_passes(verdicts: Verdicts, case: Case) -> None:
    path, verdict = verdicts[case.name]
    try:
        failed = [one.name for one in check(path).findings if one.status is Status.FAIL]
    except CheckpointError:
        failed = ["unreadable"]
    assert failed == ([case.finding] if case.finding else [])
    if verdict["error"] or any(not name.startswith(IDLE) for name in verdict["unset"]):
        assert failed, verdict


def test_tables_of_methods_classes_and_algorithms_are_the_engines(judged: dict[str, Any]) -> None:
    assert set(judged["methods"]) <= schemes.METHODS
    assert {"LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle", "Eagle3DeepseekV2ForCausalLM",
            *kinds.DFLASH} <= set(judged["classes"])  # fmt: skip
    assert {"EAGLE", "EAGLE3", "DFLASH", "DSPARK", "STANDALONE"} <= set(judged["algorithms"])


@pytest.mark.parametrize("name", METHODS)
def test_places_that_are_quantised_are_the_engines(verdicts: Verdicts, name: str) -> None:
    path, verdict = verdicts[f"quantised: {name}"]
    said = schemes.read_quantisation(path, json.loads((path / "config.json").read_text()))
    scheme = schemes.scheme_of(said or {})
    assert isinstance(scheme, schemes.Scheme)
    covered = {module for one in engine.parameters(flat()) if scheme.covers(module := one.removesuffix(".weight"))}
    assert covered == {part for module in verdict["quantised"] for part in unfused(module.removeprefix("model."))}
    held = {one.rpartition(".")[2] for one in verdict["params"] if "down_proj" in one}
    assert {*scheme.needed} <= held <= {*scheme.needed, *scheme.optional}
