"""Plots: every function draws every kind of diff, marks what it must, and stays small whatever the trace's size."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.capture import Statistics
from eagle_trace.errors import TraceNotFoundError, UsageError
from eagle_trace.extras import way_to
from eagle_trace.reader import open_trace
from eagle_trace_analysis import Diff, diff, plots
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.plots import style
from eagle_trace_analysis.plots.features import degenerate
from eagle_trace_analysis.plots.weights import compare_params
from tests.support.synthetic import ROUND, Side, make_prompts, nan, only, value_sites, write_trace

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[3] / "golden"
PROMPTS = make_prompts(2)


ALL_BUT_TWO = tuple(site for site in value_sites() if site not in ("fused", "logits"))
LEFT_OUT = [{"site": "*", "rows": "all", "why": "left out"}]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "agree": ({}, {"noise_seed": 3}),
    "identical": ({}, {}),
    "shape": ({}, {"single_layer": True}),
    "values": ({}, {"fault": only("layer.0.attn.q", 1, lambda _, values: values * 1.045)}),
    "infinite": ({"fault": only("embed", 0, lambda _, values: values * 0)}, {}),
    "nonfinite": ({}, {"fault": only("norm", 0, nan)}),
    "positions": ({}, {"position_shift": lambda _, step: step}),
    "ids": ({}, {"d2t": np.zeros(48, dtype=int)}),
    "stats": ({}, {"level": "stats"}),
    "shapes": ({}, {"level": "shapes"}),
    "two-sites": (
        {"without": ALL_BUT_TWO, "not_materialised": LEFT_OUT},
        {"without": ALL_BUT_TWO, "not_materialised": LEFT_OUT},
    ),
    "no-output": ({"without": ("logits", "topk.draft_id")}, {"without": ("logits", "topk.draft_id")}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Diff]:
    folder = tmp_path_factory.mktemp("plots")
    made = {}
    for name, (train, serve) in CASES.items():
        left = write_trace(folder / f"{name}-train.trace", Side("train", **train), PROMPTS)
        made[name] = diff(
            left, write_trace(folder / f"{name}-serve.trace", Side("serve", **serve), PROMPTS, rounds=[ROUND])
        )
    others = [replace(prompt, key=f"other-{prompt.key}") for prompt in PROMPTS]
    left = write_trace(folder / "incomparable-train.trace", Side("train"), others)
    made["incomparable"] = diff(left, write_trace(folder / "incomparable-serve.trace", Side("serve"), PROMPTS))
    return made


@pytest.fixture(scope="module")
def golden() -> Diff:
    return diff(open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "broken.trace"))


@pytest.mark.parametrize("plot", plots.__all__)
@pytest.mark.parametrize("name", [*CASES, "incomparable"])
def test_every_plot_draws_every_kind_of_diff(name: str, plot: str, results: dict[str, Diff]) -> None:
    figure = getattr(plots, plot)(results[name])
    assert figure.layout.title.text
    assert figure.layout.height >= 190
    figure.to_json()


@pytest.mark.parametrize("plot", plots.__all__)
def test_every_plot_draws_real_traces(plot: str, golden: Diff) -> None:
    figure = getattr(plots, plot)(golden)
    assert len(figure.data) >= 1


@pytest.mark.parametrize("plot", ["ladder", "error_map", "by_step", "logits", "accept_length", "weights", "features"])
def test_axes_are_titled_and_colours_are_told_apart(plot: str, golden: Diff) -> None:
    layout = getattr(plots, plot)(golden).layout.to_plotly_json()
    titles = [axis.get("title", {}).get("text") for name, axis in layout.items() if name.startswith(("xaxis", "yaxis"))]
    assert [title for title in titles if title]


def test_the_palette_survives_colour_blindness() -> None:
    # deuteranopia and protanopia leave lightness and the blue-yellow axis: every pair must differ in one of them
    def seen(color: str) -> tuple[float, float]:
        red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        return light ** (1 / 3), blue - (red + green) / 2

    for at, first in enumerate((style.TRAIN, style.SERVE)):
        for other in (style.TRAIN, style.SERVE)[at + 1 :]:
            a, b = seen(first), seen(other)
            assert abs(a[0] - b[0]) + abs(a[1] - b[1]) > 0.4
    assert len(set(style.STEP_SYMBOLS)) == len(style.STEP_COLORS)


def test_the_ladder_lists_sites_in_forward_order_and_marks_the_first_divergence(results: dict[str, Diff]) -> None:
    figure = plots.ladder(results["shape"])
    order = list(figure.layout.yaxis.categoryarray)[::-1]
    assert order[:3] == ["token", "position", "fused"]
    assert order.index("fc.out") < order.index("layer.0.attn.q") < order.index("logits")
    assert figure.layout.shapes[0].y0 == "fused"
    assert "first divergence" in figure.layout.annotations[0].text
    beside = [text for trace in figure.data[1:] if trace.mode == "text" for text in trace.text if text]
    assert any("[T, 96] in training, [T, 32] in serving" in text for text in beside)


def test_the_ladder_has_a_line_a_step_and_a_tolerance_band(results: dict[str, Diff]) -> None:
    names = [trace.name for trace in plots.ladder(results["agree"]).data if trace.name]
    assert names == ["within tolerance", "step 0", "step 1", "step 2"]
    with pytest.raises(ValueError, match="rho_max"):
        plots.ladder(results["agree"], statistic="nonsense")


def test_the_map_shows_error_over_tolerance_where_it_is(results: dict[str, Diff]) -> None:
    result = results["values"]
    figure = plots.error_map(result, step=1)
    heat = figure.data[0]
    sites = [text.replace("<b>▸ ", "").replace("</b>", "") for text in figure.layout.yaxis.ticktext]
    assert (heat.z[sites.index("layer.0.attn.q")] > 1).all()
    assert (heat.z[sites.index("layer.0.attn.k")] < 0).all()
    ratio = heat.customdata[sites.index("layer.0.attn.q"), 0]
    assert ratio[0] == pytest.approx(0.045, rel=1e-3)
    assert "root" in heat.text[0][0]
    one = plots.error_map(result, step=1, prompt="prompt-0")
    assert one.data[0].z.shape[1] < heat.z.shape[1]


def test_a_site_of_another_shape_is_one_dark_bar_that_says_why(results: dict[str, Diff]) -> None:
    figure = plots.error_map(results["shape"])
    assert "rows are [T, 96] float32 in training and [T, 32] float32 in serving" in figure.data[1].text[0][0]
    assert np.isnan(figure.data[0].z[0]).all()


def test_the_map_s_tokens_are_text_on_real_traces(golden: Diff) -> None:
    assert '"h"' in plots.error_map(golden).layout.xaxis.ticktext


def test_drafted_lists_rows_that_differ_first(golden: Diff) -> None:
    cells = plots.drafted(golden).data[0].cells["values"]
    assert list(cells[-1]) == sorted(cells[-1])
    assert len(cells[0]) <= 40
    assert len(plots.drafted(golden, rows=3).data[0].cells["values"][0]) == 3


def test_accept_length_shows_observed_beside_predicted(golden: Diff) -> None:
    figure = plots.accept_length(golden)
    bars = {trace.name: list(trace.y) for trace in figure.data if trace.type == "bar"}
    assert bars["observed"] == [100 * share for share in golden.accept_length.by_depth]
    if golden.accept_length.predicted_by_depth:
        assert len(bars) == 2


def test_row_figures_agree_with_the_diff(golden: Diff) -> None:
    figures = RowFigures.of(golden)
    for result in golden.sites:
        if result.site == "layer.0.out" and result.metrics is not None:
            found = figures.site("layer.0.out", figures.rows(result.step))
            assert found is not None
            known = found.error[~np.isnan(found.error)]
            assert len(known) == result.metrics.rows
            assert known.max() == pytest.approx(result.metrics.rho_max)  # type: ignore[union-attr]


def test_weights_say_what_is_the_same(golden: Diff) -> None:
    table = compare_params(open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "broken.trace"))
    status = dict(zip(table["name"], table["status"], strict=True))
    assert status["fc.weight"] == "same"
    assert status["t2d"] == "one side"


def statistics(norm: list[float], nonfinite: int = 0) -> Statistics:
    values = np.array(norm)
    return Statistics(values, values / 2, values / 3, np.full(len(values), nonfinite, dtype=np.int32))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": statistics([1, 2, 3]), "b": statistics([4, 5, 6])}, []),
        ({"a": statistics([0, 2, 3])}, ["a is all zero in 1 of 3 rows"]),
        ({"a": statistics([1, 2], nonfinite=1)}, ["a is not finite in 2 rows"]),
        ({"a": statistics([1, 1, 2])}, ["a repeats the row before in 1 rows"]),
        ({"a": statistics([1, 2]), "b": statistics([1, 5])}, ["a equals b in 1 rows"]),
    ],
)
def test_degenerate_features_are_named(found: dict[str, Statistics], words: list[str]) -> None:
    assert degenerate(found) == words


def test_ten_thousand_columns_become_a_few_hundred() -> None:
    parts = style.bins(10_000)
    assert 200 <= len(parts) <= style.MOST
    assert np.array_equal(np.concatenate(parts), np.arange(10_000))
    assert [len(part) for part in style.bins(10)] == [1] * 10
    assert style.bins(0) == []


def test_a_log_axis_is_labelled_at_its_powers() -> None:
    axis = style.log_ticks(1e-7, 10)
    assert axis["ticktext"][:2] == ["10⁻⁷", "10⁻⁶"]
    assert axis["ticktext"][-1] == "10"


def test_traces_may_have_moved(results: dict[str, Diff], tmp_path: Path) -> None:
    lost = replace(results["agree"], traces={side: {"path": str(tmp_path / side)} for side in ("train", "serve")})
    with pytest.raises(TraceNotFoundError):
        plots.error_map(lost)
    paths = [open_trace(str(results["agree"].traces[side]["path"])) for side in ("train", "serve")]
    assert plots.error_map(lost, train=paths[0], serve=paths[1]).data


@pytest.mark.parametrize("draw", [plots.ladder, plots.accept_length, plots.by_step])
def test_without_plotly_the_way_out_is_named(
    draw: Callable[[Diff], Any], results: dict[str, Diff], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(UsageError, match=re.escape(way_to("notebook"))):
        draw(results["agree"])
