"""What is quoted from a server, a trace or a file is printable wherever it is shown, and no markup is read in it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.padding import Padding
from rich.table import Table
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace.printable import html_text, json_text, printable
from eagle_trace.terminal import PlainConsole
from tests.support.hostile import hostile_pair
from tests.support.pairs import DRAFT
from tests.support.tables import edit_manifest

pytestmark = pytest.mark.slow

STEERING = {
    "escape": "\x1b[2J", "bell": "\x07", "backspace": "\b", "delete": "\x7f", "C1 sequence": "\x9b31m",
    "override": "\u202e", "isolate": "\u2066", "mark": "\u200f", "zero width": "\u200b", "joiner": "\u200d",
    "byte order": "\ufeff", "line": "\u2028", "paragraph": "\u2029", "tag": "\U000e0041", "surrogate": "\ud83d",
    "soft hyphen": "\xad", "filler": "\u3164", "private": "\ue000", "return": "\r", "nul": "\0",
}  # fmt: skip
HOSTILE = "".join(words for name, words in STEERING.items() if name not in ("surrogate", "nul")) + "[bold red]x[/]"


def steers(text: str) -> list[str]:
    """Characters of an output that a terminal would act on or a reader would not see."""
    return [one for one in text if printable(one, keep="\n") != one]


@pytest.mark.parametrize("words", STEERING.values(), ids=STEERING)
def test_what_has_no_glyph_is_shown_as_an_escape(words: str) -> None:
    shown = printable(f"a{words}b")
    assert steers(shown) == []
    assert shown.startswith("a\\")
    assert steers(html_text(f"a{words}b")) == []
    text = json_text(json.dumps({"a": f"a{words}b"}, ensure_ascii=False))
    assert steers(text) == []
    assert json.loads(text) == {"a": f"a{words}b"}


def test_what_has_a_glyph_stays_as_it_is() -> None:
    for words in ("plain", "Grüße", "你好 世界", "日本\u3000語", "e\u0301", "🙂", "a\u00a0b", "▁the"):
        assert printable(words) == words
        assert json_text(f'"{words}"') == f'"{words}"'


def test_the_console_reads_no_markup_and_prints_nothing_that_steers_wherever_it_stands() -> None:
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=200)
    table = Table(box=None)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    for one in (HOSTILE, table, Padding(HOSTILE, (0, 2))):
        console.print(one)
    text = stream.getvalue()
    assert steers(text) == []
    assert text.count("x[/]") == 4  # narrow columns wrap it


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code in (0, 1, 2), done.output
    return done.output


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pair = hostile_pair(tmp_path_factory.mktemp("hostile"))
    for trace in pair:
        # a site that no version knows, seen by the host
        edit_manifest(trace, lambda data: data.update(warnings=[HOSTILE], stopped=HOSTILE))
    return pair


@pytest.mark.parametrize(
    "options", [[], ["--format", "json"], ["--site", "fc.out", "--root", "0"], ["--site", HOSTILE, "--root", "0"]]
)
def test_show_prints_nothing_that_steers(options: list[str], hostile: tuple[Path, Path]) -> None:
    assert steers(run("show", hostile[1], *options)) == []


@pytest.mark.parametrize("options", [[], ["--sites", "all"], ["--format", "json"]])
def test_diff_prints_nothing_that_steers(options: list[str], hostile: tuple[Path, Path]) -> None:
    assert steers(run("diff", *hostile, *options)) == []


def test_a_report_and_a_notebook_hold_nothing_that_steers(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    assert steers(run("diff", *hostile, "--format", "html", "--out", tmp_path / "report.html")) == []
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    own = page[: page.index("<script")] + page[page.index("</main>") : page.index("</footer>")]
    assert steers(own.replace("\t", "")) == []
    assert "'unsafe-inline'" not in page.split("script-src", 1)[1].split(";", 1)[0]
    assert steers(open_trace(hostile[0])._repr_html_()) == []


@pytest.mark.parametrize("place", ["\x1b[31mno\u202etrace", "no\x9b31m"])
def test_error_sentences_print_nothing_that_steers(place: str, tmp_path: Path) -> None:
    done = run("show", tmp_path / place)
    assert "is not a trace" in done
    assert steers(done) == []


@pytest.mark.parametrize("format", ["text", "json"])
def test_check_and_export_print_nothing_that_steers(format: str, tmp_path: Path) -> None:
    draft = tmp_path / "\x1b[31mdraft\u202e"
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {HOSTILE: HOSTILE, "norm_before_residual": HOSTILE}))
    assert steers(run("check", draft, "--format", format)) == []
    assert steers(run("export", draft, tmp_path / "\x1b[31mout", "--force")) == []
