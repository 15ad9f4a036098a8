"""The HTML report: the verdict first, everything in one file, nothing from outside is taken for markup."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.extras import way_to
from eagle_trace.reader import open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.report.html import render_html
from eagle_trace_analysis.report.sections import e, lead
from tests.support.endings import ending_of
from tests.support.hostile import SCRIPT, hostile_pair
from tests.support.synthetic import Side, make_prompts, write_trace

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def golden(name: str) -> Diff:
    train, serve = open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / f"{name}.trace")
    return diagnosed(diff(train, serve), train, serve)


@pytest.fixture(scope="module")
def broken() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return render_html(golden("broken"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    train, serve = (open_trace(path) for path in hostile_pair(tmp_path_factory.mktemp("hostile")))
    return render_html(diff(train, serve))


def figures(page: str) -> dict[str, Any]:
    return {
        name: json.loads(text) for name, text in re.findall(r'id="figure-([a-z-]+)">(.*?)</script>', page, re.DOTALL)
    }


def test_the_verdict_comes_first_and_everything_else_behind_it(broken: str) -> None:
    order = ["<h1>", "single-layer-features", 'id="first"', "id='causes'", "id='plots'", 'id="all"', 'id="made"']
    places = [broken.index(words) for words in order]
    assert places == sorted(places)
    text = Elements(broken).text
    assert "Training and serving part at fused , step 0" in text
    assert "[T, 384] bfloat16 in training and [T, 128] bfloat16 in serving" in text


def test_causes_are_shown_with_their_fix_and_suspects_as_ruled_out(broken: str) -> None:
    text = Elements(broken).text
    assert re.search(r"confirmed single-layer-features at fused .* Fix: ", text)
    assert re.search(r"Ruled out: \d+ .*d2t-absolute d2t: 48 of 48 draft ids", text)
    assert re.search(r"Not tested: \d+ .*To test it: ", text)


def test_a_diff_without_a_diagnosis_has_a_report_too() -> None:
    page = render_html(diff(open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "healthy.trace")))
    assert "Training and serving agree" in Elements(page).text
    assert "id='causes'" not in page
    assert 'id="first"' not in page


def test_one_file_holds_everything(broken: str) -> None:
    elements = Elements(broken)
    assert not [tag for tag, names in elements.found if tag in ("link", "img", "iframe", "object") or "src" in names]
    assert "default-src 'none'" in broken
    assert broken.count("plotly.js v") == 1
    assert len(broken) < 10e6
    assert set(figures(broken)) == {
        "ladder",
        "map",
        "logits",
        "drafted",
        "accept-length",
        "steps",
        "weights",
        "features",
    }


def test_the_table_has_every_site_and_step(broken: str) -> None:
    assert broken.count("data-verdict=") == len(golden("broken").sites)


def test_provenance_of_both_sides_is_there(broken: str) -> None:
    text = Elements(broken).text
    for words in ("speculators 0.9.0", "sglang 0.5.23", "CUDA graphs off", "prompts digest"):
        assert words in text


def test_hostile_text_becomes_text(hostile: str) -> None:
    elements = Elements(hostile)
    scripts = [names for tag, names in elements.found if tag == "script"]
    assert len([names for names in scripts if names.get("type") != "application/json"]) == 2
    assert not [tag for tag, _ in elements.found if tag in ("img", "iframe", "object", "base", "form", "a")]
    assert not [names for _, names in elements.found if any(name.startswith("on") for name in names)]
    assert SCRIPT in elements.text
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile


def test_hostile_text_is_no_markup_in_plots(hostile: str) -> None:
    for figure in figures(hostile).values():
        text = json.dumps(figure, ensure_ascii=False)
        assert "<script" not in text
        assert "<img" not in text
        assert "<a " not in text


def test_embedded_json_cannot_end_its_script(hostile: str) -> None:
    for block in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', hostile, re.DOTALL):
        assert "<" not in block
        json.loads(block)


def test_e_shows_what_steers_a_terminal_or_turns_text() -> None:
    assert e("a\x1b[2J<b>\u202e'\"") == "a\\u001b[2J&lt;b&gt;\\u202e&#x27;&quot;"


def test_a_trace_that_is_gone_costs_only_the_plots_that_read_it(tmp_path: Path) -> None:
    paths = hostile_pair(tmp_path)
    result = diff(*(open_trace(path) for path in paths))
    paths[0].rename(tmp_path / "elsewhere.trace")
    page = render_html(result)
    assert set(figures(page)) == {"ladder"}
    assert "Plots that read the traces are left out" in page


def test_incomparable_traces_have_a_report(tmp_path: Path) -> None:
    train = open_trace(hostile_pair(tmp_path)[0])
    page = render_html(diff(train, open_trace(GOLDEN / "healthy.trace")))
    assert "The two traces could not be compared" in Elements(page).text
    assert "no prompt in common" in Elements(page).text


def test_the_report_claims_no_equality_that_was_not_found(tmp_path: Path) -> None:
    prompts = make_prompts(2)
    moved = Side("serve", single_layer=True, position_shift=lambda _, step: step)
    train = write_trace(tmp_path / "train.trace", Side("train"), prompts)
    alone = write_trace(tmp_path / "alone.trace", Side("serve", single_layer=True), prompts)
    both = write_trace(tmp_path / "both.trace", moved, prompts)
    assert "Nothing it is computed from was found to differ" in lead(diff(train, alone))
    assert "Nothing it is computed from was found to differ" not in lead(diff(train, both))


# ---- the command -------------------------------------------------------------------------------------------------


def run(*options: str) -> Any:
    sides = [str(GOLDEN / "train.trace"), str(GOLDEN / "broken.trace")]
    return CliRunner().invoke(app, ["diff", *sides, "--format", "html", *options])


def test_the_command_writes_the_report_and_says_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "report.html"
    done = run("--out", str(out))
    assert done.exit_code == 1
    assert ending_of(done.stdout)[0] == "diverged: train and serve first part at fused, step 0 (shape)"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_html_needs_a_file() -> None:
    done = run()
    assert done.exit_code == 2
    assert "--out report.html" in done.output


def test_without_plotly_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = run("--out", str(tmp_path / "report.html"))
    assert done.exit_code == 2
    assert way_to("notebook") in done.output
    assert not (tmp_path / "report.html").exists()


# ---- notebooks ---------------------------------------------------------------------------------------------------


def test_results_show_themselves() -> None:
    result = golden("broken")
    shown = result._repr_html_()
    assert "Training and serving part at" in shown
    assert "single-layer-features" in shown
    assert result.diagnosis is not None
    assert "ruled out" in result.diagnosis._repr_html_()
    trace = open_trace(GOLDEN / "broken.trace")._repr_html_()
    assert "serve side, by sglang" in trace


def test_results_show_hostile_text_as_text(tmp_path: Path) -> None:
    train, serve = (open_trace(path) for path in hostile_pair(tmp_path))
    for one in (train, serve, diff(train, serve)):
        found = {tag for tag, _ in Elements(one._repr_html_()).found}
        assert found <= {"div", "p", "b", "code", "table", "tr", "th", "td", "span", "br"}
