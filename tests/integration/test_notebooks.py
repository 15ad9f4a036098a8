"""The notebooks run from top to bottom on real traces, and what they show opens in a browser."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from plotly.offline import get_plotlyjs

from tests.support.browser import Page, browser

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture(scope="module")
def executed() -> dict[str, Any]:
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_TRACE_TRACES", str(ROOT / "tests" / "golden"))
        for path in NOTEBOOKS:
            notebook = nbformat.read(path, as_version=4)
            # the golden traces name their checkpoints relative to the repository
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
            made[path.stem] = notebook
    return made


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_there_are_two_notebooks_and_the_first_needs_ten_cells() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["divergence", "story"]
    cells = nbformat.read(NOTEBOOKS[0], as_version=4).cells
    assert sum(cell.cell_type == "code" for cell in cells) == 10


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_and_no_path_of_a_machine_is_in_git(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert "/home" not in text
    assert "/work" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_public_names_only(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not [line for line in cell.source.splitlines() if "._" in line or "import _" in line]


def test_every_cell_runs_without_a_warning(executed: dict[str, Any]) -> None:
    for name, notebook in executed.items():
        for output in outputs(notebook):
            assert output.output_type != "error", name
            assert output.get("name") != "stderr", output


def test_the_first_notebook_ends_with_the_cause(executed: dict[str, Any]) -> None:
    shown = executed["divergence"].cells[-1].outputs[0].data["text/html"]
    assert "single-layer-features" in shown
    assert "confirmed" in shown
    assert "ruled out" in shown


def test_the_story_rules_out_the_innocent_and_ends_healthy(executed: dict[str, Any]) -> None:
    shown = [output.data["text/html"] for output in outputs(executed["story"]) if "text/html" in output.data]
    for suspect in ("d2t-absolute", "d2t-missing", "d2t-stale", "lm-head-tied", "lm-head-from-target"):
        assert any(f"<td>{suspect}</td>\n      <td>ruled_out</td>" in one for one in shown), suspect
    assert any("Training and serving agree" in one for one in shown)


def page_of(notebook: Any) -> str:
    """What a notebook shows, as a page: its HTML outputs, and its plots drawn by plotly's own script."""
    parts, calls = [], []
    for number, output in enumerate(outputs(notebook)):
        data = output.get("data", {})
        if PLOTLY in data:
            figure = json.dumps(data[PLOTLY]).replace("<", "\\u003c")
            parts.append(f"<div id='plot{number}'></div>")
            calls.append(f"(f => Plotly.newPlot('plot{number}', f.data, f.layout))({figure});")
        elif "text/html" in data:
            parts.append(data["text/html"])
        else:
            parts.append(f"<pre>{html.escape(data.get('text/plain', ''))}</pre>")
    body = "".join(parts)
    return f"<meta charset='utf-8'><script>{get_plotlyjs()}</script><body>{body}<script>{''.join(calls)}</script>"


def test_plots_and_results_show_in_a_browser(executed: dict[str, Any], tmp_path: Path) -> None:
    with browser() as started:
        for name, notebook in executed.items():
            path = tmp_path / f"{name}.html"
            path.write_text(page_of(notebook), encoding="utf-8")
            page = Page(started.new_page(viewport={"width": 1280, "height": 900}))
            page.open(path)
            plots = sum(PLOTLY in output.get("data", {}) for output in outputs(notebook))
            page.page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot').length === {plots}")
            assert plots >= 4, name
            assert page.problems == []
            page.page.screenshot(path=str(tmp_path / f"{name}.png"), full_page=True)
