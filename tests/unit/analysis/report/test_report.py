"""Reports: the answer is in the first three lines, everything fits 80 columns, the JSON is strict and as
documented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from eagle_trace.capture import Rows
from eagle_trace.cli.main import app
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.report.json import to_json, to_json_text
from eagle_trace_analysis.report.text import render
from tests.support.endings import ending_of
from tests.support.synthetic import F64, ROUND, Side, make_prompts, nan, only, write_trace

ROOT = Path(__file__).parents[4]
PROMPTS = make_prompts(2)


def from_nothing(rows: Rows, values: F64) -> F64:
    return np.zeros_like(values)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "agree": ({}, {"noise_seed": 3}),
    "shape": ({}, {"single_layer": True}),
    "values": ({}, {"fault": only("layer.0.attn.q", 1, lambda _, values: values * 1.045)}),
    "infinite": ({"fault": only("embed", 0, from_nothing)}, {}),
    "nonfinite": ({}, {"fault": only("norm", 0, nan)}),
    "positions": ({}, {"position_shift": lambda _, step: step}),
    "position-offset": ({"position_shift": lambda *_: 1}, {}),
    "ids": ({}, {"d2t": np.zeros(48, dtype=int)}),
    "stats": ({}, {"level": "stats"}),
    "shapes": ({}, {"level": "shapes"}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Diff]:
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    for name, (train, serve) in CASES.items():
        left = write_trace(folder / f"{name}-train.trace", Side("train", **train), PROMPTS)
        right = write_trace(folder / f"{name}-serve.trace", Side("serve", **serve), PROMPTS, rounds=[ROUND])
        made[name] = diff(left, right)
    others = [
        replace(prompt, key=f"a-prompt-with-a-very-long-key-that-goes-on-and-on-{prompt.key}") for prompt in PROMPTS
    ]
    left = write_trace(folder / "incomparable-train.trace", Side("train"), others)
    made["incomparable"] = diff(left, write_trace(folder / "incomparable-serve.trace", Side("serve"), PROMPTS))
    tokens = [replace(prompt, tokens=(3, *prompt.tokens[1:])) for prompt in others]
    made["tokens"] = diff(left, write_trace(folder / "tokens-serve.trace", Side("serve"), tokens))
    servers = [
        write_trace(folder / f"servers-{number}.trace", Side("serve", **options), PROMPTS, rounds=[ROUND])
        for number, options in enumerate(CASES["values"])
    ]
    made["servers"] = diff(*servers)
    return made


NAMES = [*CASES, "incomparable", "tokens", "servers"]

# ---- text
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_eighty_columns_and_is_plain(name: str, results: dict[str, Diff]) -> None:
    lines = render(results[name]).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert not any("\x1b" in line for line in lines)
    last = ending_of(render(results[name]))
    assert last[0].startswith(results[name].verdict)
    assert any(line.startswith("coverage: ") for line in last)


def test_the_ending_begins_with_verdict_divergence_and_coverage(results: dict[str, Diff]) -> None:
    first, second, third = ending_of(render(results["shape"]))[:3]
    assert first == "diverged: train and serve first part at fused, step 0 (shape)"
    assert second == "train [T, 96] float32 | serve [T, 32] float32"
    assert re.fullmatch(r"coverage: \d+ of \d+ serve rows have a train row \(100%\)", third)


def test_an_agreement_says_how_far_apart_the_sides_are_at_most(results: dict[str, Diff]) -> None:
    first, second, _ = ending_of(render(results["agree"]))[:3]
    assert first.startswith("agree: ")
    assert "allowed" in second


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("values", ["layer.0.attn.q, step 1", "4.50e-02", "1.045 x train", "worst row: prompt 'prompt-"]),
        ("positions", ["position, step 1 (positions)"]),
        ("position-offset", ["position-offset", "no effect under RoPE"]),
        ("ids", ["topk.target_id, step 0 (ids)", "draft id"]),
        ("nonfinite", ["1 not finite"]),
        ("incomparable", ["no prompt in common", "prompt-0"]),
        ("tokens", ["token 0"]),
        ("agree", ["2.00 tokens per round, bonus token included", "depth 1: 100%, 2: 0%"]),
        ("incomparable", ["not known"]),
    ],
)
def test_text_says(name: str, words: list[str], results: dict[str, Diff]) -> None:
    text = " ".join(render(results[name], width=200).split())
    for word in words:
        assert word in text


def test_color_is_there_when_asked_for(results: dict[str, Diff]) -> None:
    assert "\x1b[" in render(results["shape"], color=True)


# ---- JSON
# -------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    text = (ROOT / "docs" / "diff-json.md").read_text(encoding="utf-8")
    return json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index, no-any-return]


TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def problems(value: Any, rule: dict[str, Any], root: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with `value` by `rule`: the part of JSON Schema that docs/diff-json.md uses."""
    if "$ref" in rule:
        return problems(value, root["$defs"][rule["$ref"].rsplit("/", 1)[1]], root, where)
    if "anyOf" in rule:
        found = [problems(value, one, root, where) for one in rule["anyOf"]]
        return [] if not all(found) else min(found, key=len)
    if "enum" in rule:
        return [] if value in rule["enum"] else [f"{where}: {value!r} is none of {rule['enum']}"]
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    fits = any(isinstance(value, TYPES[one]) and not (isinstance(value, bool) and one != "boolean") for one in types)
    if not fits:
        return [f"{where}: {value!r} is no {types}"]
    found = []
    if isinstance(value, list) and "items" in rule:
        for number, item in enumerate(value):
            found += problems(item, rule["items"], root, f"{where}[{number}]")
    if isinstance(value, dict):
        found += [f"{where}: no {name}" for name in rule.get("required", []) if name not in value]
        for name, item in value.items():
            inner = rule.get("properties", {}).get(name, rule.get("additionalProperties", True))
            if inner is False:
                found.append(f"{where}: {name} is not in the schema")
            elif inner is not True:
                found += problems(item, inner, root, f"{where}.{name}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_json_is_strict_and_as_documented(name: str, results: dict[str, Diff]) -> None:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not strict JSON")

    data = json.loads(to_json_text(results[name]), parse_constant=refuse)
    assert data == to_json(results[name])
    assert problems(data, schema(), schema()) == []


def test_the_schema_check_finds_what_is_wrong(results: dict[str, Diff]) -> None:
    data = to_json(results["values"])
    for change in ({"verdict": "fine"}, {"extra": 1}, {"sites": [{}]}, {"exit_status": "1"}):
        assert problems(data | change, schema(), schema())
    assert problems({key: value for key, value in data.items() if key != "level"}, schema(), schema())


def test_numbers_that_are_not_finite_are_strings(results: dict[str, Diff]) -> None:
    found = to_json(results["infinite"])["first_divergence"]
    assert (found["site"], found["value"]) == ("embed", "Infinity")


def test_coverage_adds_up_in_json(results: dict[str, Diff]) -> None:
    for site in to_json(results["agree"])["sites"]:
        coverage = site["coverage"]
        for side in ("train", "serve"):
            skipped = sum(coverage["skipped"][side].values())
            assert coverage["matched"] + coverage["unmatched"][side] + skipped == coverage["rows"][side]


# ---- the command
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(results: dict[str, Diff]) -> Callable[..., Any]:
    def call(name: str, *options: str, swap: bool = False) -> Any:
        sides = [str(results[name].traces[side]["path"]) for side in ("train", "serve")]
        return CliRunner().invoke(app, ["diff", *(reversed(sides) if swap else sides), *options])

    return call


@pytest.mark.parametrize(("name", "status"), [("agree", 0), ("shape", 1), ("incomparable", 2)])
def test_the_exit_status_is_the_verdict(name: str, status: int, run: Any, results: dict[str, Diff]) -> None:
    done = run(name)
    assert done.exit_code == status
    assert ending_of(done.stdout)[0] == ending_of(render(results[name]))[0]


def test_the_command_prints_json(run: Any) -> None:
    done = run("shape", "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["first_divergence"]["site"] == "fused"


def test_a_report_file_is_written_and_not_overwritten(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.json"
    done = run("agree", "--format", "json", "--out", str(out))
    assert done.exit_code == 0
    assert f"Wrote {out}" in done.output
    assert json.loads(out.read_text())["verdict"] == "agree"
    again = run("shape", "--out", str(out))
    assert again.exit_code == 2
    assert "--force" in again.output
    assert run("shape", "--out", str(out), "--force").exit_code == 1
    assert ending_of(out.read_text())[0].startswith("diverged")


def test_a_train_and_a_serve_trace_make_the_same_report_in_either_order(run: Any) -> None:
    done, swapped = run("shape"), run("shape", swap=True)
    assert (swapped.exit_code, swapped.output) == (done.exit_code, done.output)


def test_a_missing_trace_is_one_sentence(run: Any, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "none"), str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "no such folder" in done.output


def test_minimum_share_is_an_option(run: Any) -> None:
    assert run("agree", "--minimum-share", "1.0").exit_code == 0
    assert run("agree", "--minimum-share", "7").exit_code == 2
