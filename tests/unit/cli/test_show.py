"""`eagle-trace show`: what a trace holds, in metadata only, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from eagle_trace.cli.main import _Commands
from eagle_trace.cli.show import show
from eagle_trace.reader import open_trace
from eagle_trace_analysis.pairing.tokens import TokenNames, _common_start, prompt_names
from eagle_trace_analysis.report.show import row, summary
from eagle_trace_analysis.report.show_text import render_summary, size
from tests.support.hostile import hostile_pair
from tests.support.synthetic import Side, make_prompts, write_trace

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"

app = typer.Typer(cls=_Commands)
app.command()(show)
app.command("other")(lambda: None)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden traces name their target relative to the repository."""
    monkeypatch.chdir(ROOT)


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["show", *options])


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_first_three_lines_say_what_it_is() -> None:
    done = run(str(GOLDEN / "broken.trace"))
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "serve trace of sglang, level values"
    assert lines[1].startswith("57 rows of 2 prompts at 22 sites, ")
    assert "accept length 1.12 over 16 rounds" in lines[2]
    assert max(len(line) for line in lines) <= 80


def test_sites_prompts_and_rounds_are_listed() -> None:
    text = run(str(GOLDEN / "healthy.trace")).stdout
    assert "[384] bfloat16" in text
    assert "the: 4 tokens" in text
    assert '"T" "h" "e" " "' in text
    assert "accepted" in text
    assert "CUDA graphs off" in text
    assert "sglang 0.5.23" in text


def test_json_says_the_same_and_is_strict() -> None:
    data = strict(run(str(GOLDEN / "broken.trace"), "--format", "json").stdout)
    assert data["format_version"] == 1
    assert (data["side"], data["rows"], data["level"]) == ("serve", 57, "values")
    fused = next(one for one in data["sites"] if one["site"] == "fused")
    assert fused["shapes"] == [{"width": 128, "dtype": "bfloat16"}]
    assert data["prompts"]["listed"][0]["token_texts"] == ['"T"', '"h"', '"e"', '" "']
    assert data["rounds"]["accept_length"] == pytest.approx(1.125)


def test_one_row_is_printed_with_its_values() -> None:
    options = [str(GOLDEN / "train.trace"), "--site", "fc.out", "--prompt", "the", "--root", "2"]
    text = run(*options).stdout
    assert text.startswith("fc.out: prompt 0, root 2, step 0\n")
    assert "[128] bfloat16, norm" in text
    data = strict(run(*options, "--format", "json").stdout)
    trace = open_trace(GOLDEN / "train.trace")
    keys = trace.keys("fc.out")
    at = np.flatnonzero((keys.prompt_id == 0) & (keys.root == 2) & (keys.step == 0))[0]
    assert data["rows"][0]["values"] == trace.values("fc.out")[at].astype(float).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--site", "fc.out", "--root", "999"], "roots 0 to"),
        (["--site", "fc.out", "--root", "2", "--step", "2"], "steps 0"),
        (["--site", "nonsense", "--root", "2"], "it has"),
        (["--site", "fc.out", "--root", "2", "--prompt", "nobody"], "0 (the)"),
        (["--site", "fc.out"], "--root 12"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(options: list[str], words: str) -> None:
    done = run(str(GOLDEN / "train.trace"), *options)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("level", ["shapes", "stats", "values"])
def test_every_level_is_shown(level: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.trace", Side("serve", level=level), make_prompts(2))
    text = render_summary(summary(trace))
    assert f"level {level}" in text
    assert "layer.0.attn.q" in text


def test_a_row_without_values_says_so(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.trace", Side("serve", level="stats"), make_prompts(1))
    assert row(trace, "fc.out", 0, 3)["rows"][0]["values"] is None
    assert "not kept at this level" in run(str(trace.path), "--site", "fc.out", "--root", "3").stdout


def test_no_control_character_of_a_trace_reaches_the_terminal(tmp_path: Path) -> None:
    text = run(str(hostile_pair(tmp_path)[1])).stdout
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "window.hacked=1" in text


def test_only_metadata_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_trace import reader, sitedata

    trace = write_trace(tmp_path / "a.trace", Side("serve"), make_prompts(2))

    def fail(*_: object) -> None:
        raise AssertionError("a row was read")

    monkeypatch.setattr(sitedata, "read_columns", fail)
    monkeypatch.setattr(reader.ValueReader, "_group", fail)
    assert summary(open_trace(trace.path))["sites"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    names = TokenNames.of(write_trace(tmp_path / "a.trace", Side("serve"), make_prompts(1)))
    assert not names.known
    assert (names(7), names(-1), names.join([1, 2])) == ("#7", "#-1", "#1 #2")


def test_tokens_are_quoted_so_that_spaces_show() -> None:
    names = TokenNames.of(open_trace(GOLDEN / "train.trace"))
    assert names.known
    assert names(32) == '" "'
    assert names(10) == '"\\n"'
    assert names(10_000_000) == "#10000000"


def test_prompts_are_told_apart_by_what_they_do_not_share(tmp_path: Path) -> None:
    prompts = [replace(prompt, key=f"key-{number}") for number, prompt in enumerate(make_prompts(2))]
    trace = write_trace(tmp_path / "a.trace", Side("train"), prompts)
    assert prompt_names(trace) == {0: "key-0", 1: "key-1"}
    assert _common_start(["You are a bot. Say a", "You are a bot. Say bee"]) == "You are a bot. Say "
    assert _common_start(["one"]) == _common_start([]) == ""
    assert _common_start(["a b", "a b c"]) == "a "
    assert _common_start(["same words", "same words"]) == ""


@pytest.mark.parametrize(("count", "words"), [(12, "12 B"), (1500, "1.5 kB"), (4.2e9, "4.2 GB"), (7e12, "7000.0 GB")])
def test_sizes_are_readable(count: int, words: str) -> None:
    assert size(count) == words
