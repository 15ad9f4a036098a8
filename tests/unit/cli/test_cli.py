"""Exit statuses of the command line that no command of its own decides."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_trace.cli import main, record
from eagle_trace.errors import Terminated


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--version"], 0), (["--help"], 0), (["no-such-command"], 2), (["diff"], 2), (["show", "nowhere"], 2)],
)
def test_what_cannot_be_done_is_two(arguments: list[str], status: int) -> None:
    assert CliRunner().invoke(main.app, arguments).exit_code == status


def test_a_bug_keeps_its_traceback_and_is_not_taken_for_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(eagle_trace.reader, "open_trace", broken)
    result = CliRunner().invoke(main.app, ["show", "nowhere"])
    assert result.exit_code == main.BUG
    assert "ZeroDivisionError: a bug" in result.stderr


def test_ctrl_c_is_not_taken_for_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eagle_trace.reader, "open_trace", interrupted)
    result = CliRunner().invoke(main.app, ["show", "nowhere"])
    assert (result.exit_code, result.stderr) == (main.INTERRUPTED, "eagle-trace: interrupted\n")


@pytest.mark.parametrize(("sealed", "said"), [(False, "interrupted; nothing was sealed"), (True, "interrupted")])
def test_an_interrupted_recording_says_so_where_nothing_was_sealed(
    sealed: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(**_: object) -> None:
        if sealed:
            shutil.copytree("tests/golden/healthy.trace", tmp_path / "t")
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "_recorder", lambda *_: interrupted)
    words = ["record", "--mode", "serve", "--target", "x", "--draft", "x", "--prompts", "x", "--quiet"]
    result = CliRunner().invoke(main.app, [*words, "--out", str(tmp_path / "t")])
    assert (result.exit_code, result.stderr) == (main.INTERRUPTED, f"eagle-trace: {said}\n")


def test_an_interrupted_command_says_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def terminated(*_: object, **__: object) -> None:
        error = Terminated()
        error.add_note("two rows are sealed")
        raise error

    monkeypatch.setattr(eagle_trace.reader, "open_trace", terminated)
    result = CliRunner().invoke(main.app, ["show", "nowhere"])
    assert (result.exit_code, result.stderr) == (main.TERMINATED, "eagle-trace: terminated; two rows are sealed\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["record", "--help"],
        ["show", "tests/golden/healthy.trace"],
        ["diff", "tests/golden/train.trace", "tests/golden/broken.trace"],
        ["check", "eagle_trace/demo/models/draft", "--target", "eagle_trace/demo/models/target"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_a_reader_that_goes_away_ends_a_command_without_a_word(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "eagle_trace.cli.main", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (main.UNREAD, "")


def test_a_pipe_of_another_kind_that_breaks_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError("of a host")

    monkeypatch.setattr(eagle_trace.reader, "open_trace", broken)
    assert CliRunner().invoke(main.app, ["show", "nowhere"]).exit_code == main.BUG


def test_the_options_of_record_stand_in_groups() -> None:
    help_ = CliRunner().invoke(main.app, ["record", "--help"], env={"COLUMNS": "200"}).stdout
    groups = [record.RUN, record.KEEP, record.TRAIN, record.SERVE, record.ATTACH]
    places = [help_.index(group) for group in groups]
    assert places == sorted(places)
    for option, group in (("--prompts", 0), ("--level", 1), ("--replay", 2), ("--batch-size", 3), ("--timeout", 4)):
        assert max(n for n, place in enumerate(places) if place < help_.index(f" {option} ")) == group, option


@pytest.mark.parametrize(
    ("file", "said"), [(None, "there is no folder"), ("training_state.pt", "specforge export --to sglang")]
)
def test_a_draft_that_cannot_be_recorded_is_told_in_the_words_of_who_knows_it(
    file: str | None, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("specforge")
    draft, models = tmp_path / "draft", Path(main.__file__).parents[1] / "demo" / "models"
    if file is not None:
        draft.mkdir()
        (draft / file).touch()
    words = [
        "record",
        "--mode",
        "train",
        "--host",
        "specforge",
        "--target",
        str(models / "target"),
        "--draft",
        str(draft),
    ]
    golden = Path(__file__).parents[2] / "golden" / "healthy.trace"
    result = CliRunner().invoke(main.app, [*words, "--replay", str(golden), "--out", str(tmp_path / "t")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert ("the forward is that of" in result.stderr) == (file is not None)
