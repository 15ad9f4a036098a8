"""The map: position by site, colour = error over tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.metrics import ratio
from eagle_trace_analysis.comparison.result import Diff, SiteResult
from eagle_trace_analysis.comparison.rowwise import RowFigures, SiteRows
from eagle_trace_analysis.pairing.tokens import TokenNames, prompt_names
from eagle_trace_analysis.plots import style

Float64 = NDArray[np.float64]

#: colour range, powers of ten of error / tolerance
_LOW, _HIGH = -2.0, 4.0
_SHAPE = "#111827"
_FEW = 48


_HOVER = (
    "<b>%{y}</b> %{text}<br>error %{customdata[0]:.2e} = %{customdata[1]:.3g} × tolerance"
    "<br>norm %{customdata[2]:.4g} in training, %{customdata[3]:.4g} in serving<extra></extra>"
)


@dataclass(frozen=True)
class _Line:
    """One site's cells: the worst row of each column."""

    site: str
    over: Float64
    rows: SiteRows | None
    result: SiteResult
    shapes: tuple[str, ...] = ()


def error_map(
    diff: Diff, *, step: int = 0, prompt: str | None = None, train: Trace | None = None, serve: Trace | None = None
) -> Any:
    """Error over tolerance of every row, position by site: blue within the tolerance, brown beyond it.

    Args:
        diff: a finished diff.
        step: draft step to draw.
        prompt: key of one prompt; all prompts side by side if None.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure. Hover shows prompt, root, token, shapes and figures. With more than 400 positions,
        neighbours share a column that shows their worst row.
    """
    figures = RowFigures.of(diff, train, serve)
    rows = figures.rows(step, prompt)
    results = {result.site: result for result in diff.sites if result.step == step and result.verdict != "not compared"}
    sites = style.forward_order(name for name, result in results.items() if result.tolerance or _shape(result))
    made = style.figure(
        f"Which rows differ: error over tolerance, step {step}",
        _subtitle(rows),
        height=190 + (20 if len(sites) <= 40 else 14) * max(4, len(sites)),
    )
    if not len(rows) or not sites:
        return style.say(made, f"no row of step {step} was compared")
    columns = style.bins(len(rows))
    lines = [_line(figures, name, rows, results[name]) for name in sites]
    names = TokenNames.of(figures.train, figures.serve)
    _add_cells(made, lines, columns, _labels(figures, rows, names))
    _add_shapes(made, lines, len(columns))
    _mark_prompts(made, figures, rows, columns, names)
    first = diff.first_divergence
    made.update_yaxes(
        range=[len(sites) - 0.5, -0.5],
        tickmode="array",
        tickvals=list(range(len(sites))),
        tickfont={"size": 11 if len(sites) <= 40 else 9},
        showgrid=False,
        ticktext=[
            f"<b>▸ {style.text(name)}</b>" if first and first.site == name and first.step == step else style.text(name)
            for name in sites
        ],
    )
    return made


def _subtitle(rows: Rows) -> str:
    prompts = len(np.unique(rows.prompt_id))
    words = f"{len(rows)} rows of {prompts} prompt{'s' if prompts != 1 else ''}, sites in forward order"
    return words + (
        f"; a column is the worst of {-(-len(rows) // style.MOST)} neighbours" if len(rows) > style.MOST else ""
    )


def _shape(result: SiteResult) -> bool:
    return result.divergence is not None and result.divergence.kind in ("shape", "presence")


def _line(figures: RowFigures, site: str, rows: Rows, result: SiteResult) -> _Line:
    found = None if _shape(result) else figures.site(site, rows)
    if found is None or result.tolerance is None:
        return _Line(site, np.full(len(rows), np.nan), None, result)
    over = ratio(found.error, np.full(len(rows), result.tolerance.allowed["rho_max"]))
    shapes = [
        f"[{data[0].width}] {data[0].dtype}"
        for trace in (figures.train, figures.serve)
        if (data := trace.site_data(site))
    ]
    return _Line(site, over, found, result, tuple(style.unique(shapes)))


def _labels(figures: RowFigures, rows: Rows, names: TokenNames) -> list[str]:
    """Prompt, root and token of each row."""
    prompts = prompt_names(figures.train, 24)
    return [
        f"{style.text(prompts.get(prompt, prompt))}, root {root}, token {style.text(style.shorten(names(token), 18))}"
        for prompt, root, token in zip(rows.prompt_id.tolist(), rows.root.tolist(), rows.token_id.tolist(), strict=True)
    ]


def _facts(result: SiteResult, side: str) -> str:
    """Shape and dtype of a side, as far as the diff says."""
    facts = getattr(result.divergence, side) if result.divergence else {}
    return f"[{', '.join(map(str, facts['shape']))}] {facts.get('dtype') or ''}" if facts.get("shape") else ""


def _add_cells(made: Any, lines: list[_Line], columns: list[NDArray[np.intp]], labels: list[str]) -> None:
    go = style.graph_objects()
    worst = np.array([[_worst(line.over[part], part) for part in columns] for line in lines])
    z = np.full(worst.shape, np.nan, dtype=np.float32)
    numbers = np.full((*worst.shape, 4), np.nan, dtype=np.float32)
    for y, line in enumerate(lines):
        if line.rows is None:
            continue
        found = np.flatnonzero(worst[y] >= 0)
        at = worst[y][found]
        z[y, found] = np.clip(np.log10(np.maximum(line.over[at], 1e-12)), _LOW, _HIGH)
        figures = (line.rows.error, line.over, line.rows.train_norm, line.rows.serve_norm)
        numbers[y, found] = np.stack([values[at] for values in figures], axis=1)
    texts = [
        [f"{labels[at]}<br>{shape}" if at >= 0 else "" for at in row]
        for row, shape in zip(worst.tolist(), map(_shapes_of, lines), strict=True)
    ]
    made.add_trace(
        go.Heatmap(
            z=z,
            x=list(range(len(columns))),
            y=list(range(len(lines))),
            text=texts,
            customdata=numbers,
            hoverongaps=False,
            hovertemplate=_HOVER,
            zmin=_LOW,
            zmax=_HIGH,
            ygap=1,
            xgap=1 if len(columns) <= _FEW else 0,
            colorscale=[list(stop) for stop in style.OVER_TOLERANCE],
            colorbar={
                "title": {"text": "error / tolerance", "side": "right"},
                "thickness": 12,
                "len": 1.0,
                "outlinewidth": 0,
                "tickvals": [-2, -1, 0, 1, 2, 3, 4],
                "ticktext": ["≤ 0.01", "0.1", "1", "10", "100", "1000", "≥ 10⁴"],
            },
        )
    )


def _worst(over: Float64, part: NDArray[np.intp]) -> int:
    """Which row of a column is furthest beyond its tolerance; -1 if none was compared."""
    return -1 if np.isnan(over).all() else int(part[int(np.nanargmax(over))])


def _shapes_of(line: _Line) -> str:
    return " | ".join(line.shapes)


def _add_shapes(made: Any, lines: list[_Line], width: int) -> None:
    """Sites that differ in shape or presence: one dark bar each, since no row of them can be compared."""
    go = style.graph_objects()
    shaped = [y for y, line in enumerate(lines) if _shape(line.result)]
    if not shaped:
        return
    z = np.full((len(lines), width), np.nan, dtype=np.float32)
    z[shaped] = 1.0
    whys = [style.text(line.result.divergence.why) if line.result.divergence else "" for line in lines]
    made.add_trace(
        go.Heatmap(
            z=z,
            x=list(range(width)),
            y=list(range(len(lines))),
            showscale=False,
            ygap=1,
            hoverongaps=False,
            colorscale=[[0, _SHAPE], [1, _SHAPE]],
            text=[[why if y in shaped else ""] * width for y, why in enumerate(whys)],
            hovertemplate="<b>%{y}</b><br>%{text}<extra></extra>",
        )
    )
    for y in shaped:
        line = lines[y]
        kind = line.result.divergence.kind if line.result.divergence else ""
        sides = [_facts(line.result, side) or "absent" for side in ("train", "serve")]
        made.add_annotation(
            name="wide",
            x=(width - 1) / 2,
            y=y,
            showarrow=False,
            font={"color": "white", "size": 11},
            text=style.text(f"{kind}: {sides[0]} | {sides[1]}"),
        )


def _mark_prompts(
    made: Any, figures: RowFigures, rows: Rows, columns: list[NDArray[np.intp]], names: TokenNames
) -> None:
    """The x axis: tokens where there is room for them, else prompts."""
    starts = np.array([part[0] for part in columns])
    prompt = rows.prompt_id[starts]
    edges = np.flatnonzero(np.diff(prompt)) + 1
    for edge in edges:
        made.add_vline(x=float(edge) - 0.5, line={"color": style.INK, "width": 1}, opacity=0.6)
    if len(columns) <= _FEW and len(columns) == len(rows):
        ticks = [float(at) for at in range(len(columns))]
        words = [style.text(style.shorten(names(token), 12)) for token in rows.token_id.tolist()]
        title = "token fed beside the target's feature, root by root"
    else:
        prompts = prompt_names(figures.train)
        spans = list(zip([0, *edges.tolist()], [*edges.tolist(), len(columns)], strict=True))
        # a line of labels across the whole width has room for some 110 letters
        wide = [(a, b) for a, b in spans if (b - a) >= len(columns) / 16] or spans[:: max(1, len(spans) // 8)]
        room = [max(int(110 * (b - a) / len(columns)) - 1, 100 // len(wide) - 2) for a, b in wide]
        ticks = [(a + b - 1) / 2 for a, b in wide]
        words = [style.text(prompts.get(int(prompt[a]), "")[:most]) for (a, _), most in zip(wide, room, strict=True)]
        title = "position (root), prompt by prompt"
    made.update_xaxes(
        tickmode="array",
        tickvals=ticks,
        ticktext=words,
        title={"text": title, "standoff": 10},
        showgrid=False,
        **({"tickangle": -60} if len(columns) <= _FEW else {}),
        tickfont={"size": 10},
        range=[-0.5, len(columns) - 0.5],
    )
