"""The HTML report in a real browser: verdict first, every plot drawn, the mouse answered, the network not asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace_analysis import diff
from eagle_trace_analysis.report.html import render_html
from tests.support.browser import Page, browser
from tests.support.hostile import hostile_pair

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("html")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, status in (("healthy", 0), ("broken", 1)):
            out = folder / f"{name}.html"
            sides = [str(GOLDEN / "train.trace"), str(GOLDEN / f"{name}.trace")]
            done = CliRunner().invoke(app, ["diff", *sides, "--format", "html", "--out", str(out)])
            assert done.exit_code == status, done.output
            made[name] = out
    train, serve = hostile_pair(folder)
    made["hostile"] = folder / "hostile.html"
    made["hostile"].write_text(render_html(diff(open_trace(train), open_trace(serve))), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def open_page(chromium: Any, path: Path, width: int = 1280) -> Page:
    page = Page(chromium.new_page(viewport={"width": width, "height": 900}))
    page.open(path)
    return page


@pytest.mark.parametrize(
    ("name", "verdict", "headline"),
    [
        ("broken", "diverged", "Training and serving part at fused, step 0"),
        ("healthy", "agree", "Training and serving agree"),
    ],
)
def test_the_verdict_is_on_the_first_screen(
    name: str, verdict: str, headline: str, reports: dict[str, Path], chromium: Any
) -> None:
    page = open_page(chromium, reports[name])
    title = page.page.locator("h1")
    assert headline in title.inner_text()
    assert verdict in title.inner_text()
    assert title.bounding_box()["y"] < 200
    assert page.problems == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["broken", "healthy", "hostile"])
def test_every_plot_is_drawn_and_nothing_sticks_out(
    name: str, width: int, reports: dict[str, Path], chromium: Any
) -> None:
    page = open_page(chromium, reports[name], width)
    assert page.draw_all() == 8
    assert page.page.evaluate("document.documentElement.scrollWidth") == width
    assert page.problems == []


def test_hovering_shows_both_sides_figures(reports: dict[str, Path], chromium: Any) -> None:
    page = open_page(chromium, reports["broken"])
    page.draw_all()
    for plot, words in (("plot-ladder", "step"), ("plot-map", "tolerance"), ("plot-weights", "training:")):
        drag = page.page.locator(f"#{plot} .nsewdrag").first
        drag.scroll_into_view_if_needed()
        if plot == "plot-map":
            box = drag.bounding_box()
            page.page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] * 0.6)
        else:
            point = page.page.locator(f"#{plot} .scatterlayer .points path").nth(4).bounding_box()
            page.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
        label = page.page.locator(f"#{plot} .hoverlayer .hovertext").first
        label.wait_for(timeout=60_000)
        assert words in (label.text_content() or "")
    assert page.problems == []


def test_the_table_of_sites_sorts_and_filters(reports: dict[str, Path], chromium: Any) -> None:
    page = open_page(chromium, reports["broken"]).page
    first = page.locator("#sites tbody tr").first
    assert first.locator("td").first.inner_text() == "token"
    largest = page.locator("#sites th button", has_text="largest error")
    largest.click()
    largest.click()
    assert page.locator("#sites th[aria-sort=descending]").inner_text().startswith("largest error")
    top = [
        float(page.locator("#sites tbody tr").nth(at).locator("td").nth(4).get_attribute("data-value")) for at in (0, 1)
    ]
    assert top[0] >= top[1] > 0.1
    page.locator("#only").check()
    assert set(page.locator("#sites tbody tr:visible").evaluate_all("rows => rows.map(r => r.dataset.verdict)")) == {
        "diverged"
    }
    page.locator("#filter").fill("logits")
    assert page.locator("#sites tbody tr:visible").count() >= 1


def test_hostile_names_run_nothing(reports: dict[str, Path], chromium: Any) -> None:
    page = open_page(chromium, reports["hostile"])
    page.draw_all()
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("img, iframe, object, embed, form, base").count() == 0
    assert page.page.locator("a[href]:not([href^='#'])").count() == 0
    assert page.problems == []


def test_opening_the_report_draws_no_plot_that_is_not_near(reports: dict[str, Path], chromium: Any) -> None:
    page = open_page(chromium, reports["broken"]).page
    last = page.locator("#plot-features")
    # two frames: what watches for plots that come near has been asked by then
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert last.get_attribute("data-drawn") is None
    last.scroll_into_view_if_needed()
    page.wait_for_function("holder => holder.dataset.drawn === 'yes'", arg=last.element_handle())
