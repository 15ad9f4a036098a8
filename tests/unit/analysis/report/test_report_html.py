"""The HTML report: the verdict first, everything in one file, nothing from outside is taken for markup."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.extras import way_to
from eagle_trace.printable import printable
from eagle_trace.reader import open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.result import Failure, Gate, Note
from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, diagnosed
from eagle_trace_analysis.report.fill import fill
from eagle_trace_analysis.report.html import render_body, render_html
from eagle_trace_analysis.report.notebook import diagnosis_html, diff_html
from eagle_trace_analysis.report.sections import lead
from tests.support.endings import ending_of
from tests.support.hostile import SCRIPT, hostile_pair
from tests.support.synthetic import Side, make_prompts, write_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden"
#: fields whose words the code chooses among and acts upon, and what is computed from the traces again
WORDS_OF_THE_CODE = frozenset({
    "kind", "verdict", "figures", "side", "statistic", "replay", "skipped_train", "skipped_serve",
})  # fmt: skip
#: keys of mappings that a report asks for
FACTS = frozenset({
    "train", "serve", "path", "host", "side", "packages", "created", "shape", "dtype", "norm", "absmax", "mean",
    "nonfinite", "element", "element_value", "token", "position", "draft_id", "target_id", "logit", "digest", "scale",
    "coherent", "rho_median", "rho_max", "prompt_key", "prompt_id", "text",
})  # fmt: skip
#: characters that markup, templates, patterns and terminals are made of
MARKUP = "<>&\"'`=/\\{}%#$ \t\nabg1\x00\x1b\x9b\u202e\u200b\ue000\ue001\ud83d"


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
    order = ["<h1>", "single-layer-features", 'id="first"', 'id="causes"', 'id="plots"', 'id="all"', 'id="made"']
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
    assert 'id="causes"' not in page
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


def strings(one: Any) -> Iterator[str]:
    """Every string that a report may show of a result: sentences, names, paths, keys of mappings."""
    if isinstance(one, str):
        yield one
    elif isinstance(one, Mapping):
        yield from strings(tuple(one))
        yield from strings(tuple(one.values()))
    elif isinstance(one, list | tuple):
        for each in one:
            yield from strings(each)
    elif is_dataclass(one):
        for field in fields(one):
            if field.name not in WORDS_OF_THE_CODE:
                yield from strings(getattr(one, field.name))


def with_strings(one: Any, change: Callable[[str], str]) -> Any:
    """The same result with every one of its `strings` changed."""
    if isinstance(one, str):
        return change(one)
    if isinstance(one, Mapping):
        # facts that the report asks for by name keep their name
        return {name if name in FACTS else change(name): with_strings(each, change) for name, each in one.items()}
    if isinstance(one, list | tuple):
        return type(one)(with_strings(each, change) for each in one)
    if is_dataclass(one) and not isinstance(one, type):
        changed = {
            field.name: with_strings(getattr(one, field.name), change)
            for field in fields(one)
            if field.init and field.name not in WORDS_OF_THE_CODE
        }
        return replace(one, **changed)
    return one


def shape_of(page: str) -> list[tuple[str, list[str]]]:
    return [(tag, sorted(names)) for tag, names in Elements(page).found]


@cache
def results() -> list[Diff]:
    """A diff with causes, a gate that fails and notes of every kind; one of two servers; one that cannot be judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        one = golden("broken")
        sides = [open_trace(GOLDEN / f"{name}.trace") for name in ("healthy", "broken")]
        two = diagnosed(diff(*sides), *sides)
    failed = Gate((Failure("diverges-now", "it diverges", "fused", 0),), baseline="a trace")
    notes = (Note("a note", "what to know"),)
    shown = replace(one, gate=failed, benign=notes, notes=(*one.notes, *notes))
    return [shown, replace(two, gate=Gate(unknown="no rounds")), replace(one, incomparable="no prompt in common")]


def shown(result: Diff) -> list[str]:
    """All that is HTML of a result, without its plots."""
    assert result.diagnosis is not None
    return [render_body(result), diff_html(result), diagnosis_html(result.diagnosis)]


@cache
def plain_shapes() -> list[list[Any]]:
    return [[shape_of(page) for page in shown(with_strings(one, lambda text: f"{text}."))] for one in results()]


@given(words=st.text(st.sampled_from(MARKUP), max_size=12))
@example(words=SCRIPT)
@example(words="' onmouseover='x")
@example(words='" onmouseover="x')
@example(words="{{ 7 * 7 }}{% include 'report.html' %}")
@example(words="<!--")
@example(words=r"\1\g<0>")
@settings(max_examples=8, deadline=None)
def test_no_string_of_a_result_becomes_markup(words: str) -> None:
    for result, shapes in zip(results(), plain_shapes(), strict=True):
        pages = shown(with_strings(result, lambda text: f"{text}.{words}"))
        assert [shape_of(page) for page in pages] == shapes
        assert all(printable(page, keep="\n\t") == page for page in pages)


def test_every_string_of_a_result_that_is_shown_is_shown_as_it_is() -> None:
    mark = "<b>&amp;{{1}}"
    marked = with_strings(results()[0], lambda text: f"{text}{mark}")
    assert Elements(render_body(marked)).text.count(mark) > 100
    text = " ".join(Elements(render_body(marked)).text.split())
    for facts in marked.traces.values():
        for one in strings([facts[name] for name in ("path", "host", "created")]):
            assert " ".join(one.split()) in text


def test_what_is_filled_in_is_escaped_and_every_character_of_it_is_seen() -> None:
    shown = fill("causes_cell.html", causes=[CauseVerdict("a\x1b[2J<b>\u202e'\"", "confirmed", "")])
    assert "a\\u001b[2J&lt;b&gt;\\u202e&#39;&#34;" in shown


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
