"""The static check: two checkpoints compared, folders that cannot be read, and the reports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from eagle_trace.cli.check import check as check_command
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.report.check import render_json, render_text
from tests.support import checkpoints as make
from tests.support.check_cases import (
    Folders,
    flat_config,
    troubles,
    write_healthy,
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


OWN = np.arange(make.DRAFT_VOCABULARY)


def test_a_repair_of_d2t_is_named_against_the_untouched_file(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    tensors["d2t"] = tensors["d2t"] - OWN
    result = check(make.write_checkpoint(tmp_path, flat_config(healthy), tensors), reference=healthy.flat)
    assert set(troubles(result)) == {"d2t", "reference"}
    (change,) = result.changes
    assert (change.name, change.differing, change.elements) == ("d2t", 95, 96)
    assert "arange was subtracted" in change.evidence


def test_reference_reports_added_gone_and_changed_with_figures(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    del tensors["embed_tokens.weight"]
    tensors["extra"] = np.ones(3, np.float32)
    tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)
    changed = tensors["fc.weight"].copy()
    changed[3, 4] = 10
    tensors["fc.weight"] = changed
    old = float(make.draft_tensors()["fc.weight"][3, 4])
    draft = make.write_checkpoint(tmp_path, make.speculators_config(), tensors)
    changes = {c.name: c for c in check(draft, reference=healthy.draft).changes}
    kinds = {name: change.change for name, change in changes.items()}
    assert kinds == {
        "embed_tokens.weight": "gone",
        "extra": "added",
        "norm.weight": "dtype",
        "fc.weight": "values",
    }
    fc = changes["fc.weight"]
    before = np.linalg.norm(make.draft_tensors()["fc.weight"].astype(np.float64))
    assert (fc.differing, fc.elements) == (1, changed.size)
    assert fc.largest == pytest.approx(abs(10 - old))
    assert fc.relative_l2 == pytest.approx(abs(10 - old) / before, rel=1e-4)
    assert "every value the same" in changes["norm.weight"].evidence


def test_missing_and_broken_folders_are_one_sentence(healthy: Folders, tmp_path: Path) -> None:
    cases: list[tuple[str, Callable[[Path], object], str]] = [
        ("no-config", lambda p: (p / "config.json").unlink(), "cannot read"),
        ("no-json", lambda p: (p / "config.json").write_text("{"), "is not JSON"),
        ("list", lambda p: (p / "config.json").write_text("[]"), "no JSON object"),
        ("no-weights", lambda p: (p / "model.safetensors").unlink(), "has no weights"),
        (
            "eagle1",
            lambda p: (p / "config.json").write_text('{"speculators_model_type": "eagle"}'),
            "is a eagle speculator, not eagle3: for SGLang, serve with --speculative-algorithm EAGLE and",
        ),
        ("dflash", lambda p: (p / "config.json").write_text('{"speculators_model_type": "dflash"}'), "DFLASH"),
        ("deep", lambda p: (p / "config.json").write_text("[" * 100_000), "nested too deeply"),
        ("pipe", lambda p: ((p / "config.json").unlink(), os.mkfifo(p / "config.json")), "is not a file"),
        ("pipe of weights", lambda p: os.mkfifo(p / "more.safetensors"), "is not a file"),
        (
            "nested",
            lambda p: (p / "config.json").write_text('{"transformer_layer_config": 3}'),
            "no transformer",
        ),
    ]
    for name, harm, words in cases:
        folder = make.write_checkpoint(tmp_path / name, flat_config(healthy), make.draft_tensors())
        harm(folder)
        with pytest.raises(CheckpointError, match=words):
            check(folder)
    with pytest.raises(CheckpointError, match="there is no folder"):
        check(tmp_path / "nowhere")
    make.write_checkpoint(tmp_path / "t", {}, make.target_tensors())
    with pytest.raises(CheckpointError, match="no num_hidden_layers"):
        check(healthy.flat, target=tmp_path / "t")


def test_broken_weight_files_are_one_sentence(healthy: Folders, tmp_path: Path) -> None:
    whole = (healthy.flat / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")

    def header(text: str) -> bytes:
        return len(text).to_bytes(8, "little") + text.encode()

    cases = {
        "empty": (b"", "too few"),
        "seven": (whole[:7], "too few"),
        "cut-header": (whole[:100], "truncated"),
        "cut-data": (whole[:-10], "truncated"),
        "huge-header": ((2**63).to_bytes(8, "little") + whole[8:], "claims a header"),
        "not-json": (whole[:8] + b"x" * length + whole[8 + length :], "not JSON"),
        "deep": (header("[" * 100_000), "not JSON"),
        "array": (header("[]"), "not a JSON object"),
        "entry": (header('{"a": 3}'), "header entry of 'a'"),
        "negative": (
            header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}'),
            "whole numbers",
        ),
        "reversed": (
            header('{"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}'),
            "whole numbers",
        ),
        "size": (header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + b"1234", "takes"),
        "none": (header("{}"), "holds no tensors"),
    }
    for name, (content, words) in cases.items():
        folder = make.write_checkpoint(tmp_path / name, flat_config(healthy), {})
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            check(folder)


def test_broken_indices_are_one_sentence(healthy: Folders, tmp_path: Path) -> None:
    cases = {
        "json": ("{", "no index"),
        "map": ('{"weight_map": 3}', "no index"),
        "absent": ('{"weight_map": {"a": "b.safetensors"}}', "incomplete"),
        "escape": ('{"weight_map": {"a": "../b.safetensors"}}', "not a file beside it"),
    }
    for name, (content, words) in cases.items():
        folder = make.write_checkpoint(tmp_path / name, flat_config(healthy), make.draft_tensors(), shards=2)
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=words):
            check(folder)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_says_status_evidence_and_fix(healthy: Folders, tmp_path: Path, width: int) -> None:
    config = flat_config(healthy) | {"tie_word_embeddings": True}
    draft = make.write_checkpoint(tmp_path, config, make.draft_tensors())
    console = Console(width=width, record=True, file=io.StringIO())
    render_text(check(draft, target=healthy.target, reference=healthy.draft), console)
    text = " ".join(console.export_text().split())
    assert "fail tied-head" in text
    assert "1 failed, 0 warned" in text
    assert "fix [lm-head-tied]: set" in text


def test_json_holds_every_finding(healthy: Folders) -> None:
    result = check(healthy.flat, target=healthy.target, reference=healthy.draft)
    data = json.loads(render_json(result))
    assert data["exit_status"] == 0
    assert data["counts"]["pass"] == len(data["findings"]) == len(result.findings)
    assert all(set(f) == {"name", "cause", "status", "evidence", "fix"} for f in data["findings"])


def test_command_line_exits_0_1_and_prints_json(healthy: Folders, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(check_command)
    assert CliRunner().invoke(app, [str(healthy.flat)]).exit_code == 0
    config = flat_config(healthy) | {"tie_word_embeddings": True}
    draft = make.write_checkpoint(tmp_path, config, make.draft_tensors())
    done = CliRunner().invoke(app, [str(draft), "--format", "json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["counts"]["fail"] == 1


def test_check_imports_no_host(healthy: Folders) -> None:
    code = (
        "import sys; from pathlib import Path; from eagle_trace_analysis.checkpoint.check import check; "
        "check(Path(sys.argv[1])); print(sorted({'torch', 'sglang', 'speculators', 'transformers'} & "
        "set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code, str(healthy.draft)],
        env={"PYTHONPATH": f"{root}:{root / 'analysis'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_files_whose_names_begin_with_a_dot_are_left_as_the_engine_leaves_them(
    healthy: Folders, tmp_path: Path
) -> None:
    folder = make.write_checkpoint(tmp_path / "draft", flat_config(healthy), make.draft_tensors())
    (folder / "._model.safetensors").write_bytes(b"left by macOS")
    assert not troubles(check(folder, target=healthy.target, reference=healthy.draft))
