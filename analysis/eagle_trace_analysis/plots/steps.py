"""Step by step: what a draft step adds to the error, and what becomes of the carry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import Diff, SiteResult
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.plots import style

Float64 = NDArray[np.float64]

_PREFERRED = ("hidden", "layer.0.attn.context", "carry", "logits")


def by_step(diff: Diff, *, train: Trace | None = None, serve: Trace | None = None) -> Any:
    """Error and norm of the carry over draft depth.

    Args:
        diff: a finished diff.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure of two panels over the draft step: the median error of the sites that hand values on (dashed:
        what is allowed of each), and the norm of the carry on both sides (median, with the middle half of the rows).
    """
    made = style.figure(
        "Step by step: does the error grow with draft depth?",
        "median over rows; dashed: what is allowed of the site",
        height=440,
        meta={"stack": True},
        grid={"rows": 1, "columns": 2, "pattern": "independent", "xgap": 0.16},
    )
    results = {
        (result.site, result.step): result
        for result in diff.sites
        if isinstance(result.metrics, Metrics) and result.tolerance is not None
    }
    sites = [site for site in _PREFERRED if any(name == site for name, _ in results)]
    if not sites:
        return style.say(made, "no values were compared")
    for number, site in enumerate(sites):
        _add_errors(made, site, [results[one] for one in sorted(results) if one[0] == site], number)
    levels = [one for trace in made.data for one in trace.y if one]
    depth = max((step for _, step in results), default=0)
    _add_norms(made, diff, train, serve)
    made.update_layout(
        xaxis={"title": {"text": "draft step (0: the extend row)"}, "dtick": 1, "range": [-0.3, depth + 0.3]},
        xaxis2={"title": {"text": "draft step"}, "dtick": 1, "range": [-0.3, depth + 0.3]},
        yaxis=style.log_ticks(min(levels, default=1e-8) / 2, max(levels, default=1.0) * 2)
        | {"title": {"text": "relative error (no unit)"}},
        yaxis2={"title": {"text": "L2 norm of carry"}, "rangemode": "tozero"},
    )
    return made


def _add_errors(made: Any, site: str, results: list[SiteResult], number: int) -> None:
    go = style.graph_objects()
    color = style.STEP_COLORS[number]
    steps = [result.step for result in results]
    errors = [result.metrics.rho_median for result in results if isinstance(result.metrics, Metrics)]
    allowed = [result.tolerance.allowed["rho_median"] for result in results if result.tolerance]
    hover = [
        f"<b>{site}</b>, step {step}<br>median error {style.number(a)}<br>{style.number(b)} allowed"
        for step, a, b in zip(steps, errors, allowed, strict=True)
    ]
    made.add_trace(
        go.Scatter(
            x=steps,
            # a log axis has no zero: what is the same bit for bit is drawn far below what is allowed
            y=[max(one, 1e-3 * b) if math.isfinite(one) else None for one, b in zip(errors, allowed, strict=True)],
            name=site,
            mode="lines+markers",
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            line={"color": color, "width": 2},
            marker={"symbol": style.STEP_SYMBOLS[number], "size": 9},
        )
    )
    dashed = {"color": color, "width": 1, "dash": "dash"}
    made.add_trace(go.Scatter(x=steps, y=allowed, mode="lines", line=dashed, showlegend=False, hoverinfo="skip"))


def _add_norms(made: Any, diff: Diff, train: Trace | None, serve: Trace | None) -> None:
    go = style.graph_objects()
    figures = RowFigures.of(diff, train, serve)
    sides: dict[str, list[tuple[int, Float64]]] = {"train": [], "serve": []}
    for step in figures.steps():
        found = figures.site("carry", figures.rows(step), errors=False)
        if found is None:
            continue
        for side, norms in (("train", found.train_norm), ("serve", found.serve_norm)):
            if len(known := norms[~np.isnan(norms)]):
                sides[side].append((step, known))
    for side, color, symbol, shift in (
        ("train", style.TRAIN, "circle", -0.04),
        ("serve", style.SERVE, "diamond", 0.04),
    ):
        steps = [step for step, _ in sides[side]]
        low, middle, high = (np.array([np.quantile(norms, q) for _, norms in sides[side]]) for q in (0.25, 0.5, 0.75))
        made.add_trace(
            go.Scatter(
                x=[step + shift for step in steps],
                y=middle,
                xaxis="x2",
                yaxis="y2",
                name=f"carry in {side}",
                mode="lines+markers",
                line={"color": color, "width": 2},
                marker={"symbol": symbol, "size": 9, "line": {"color": style.INK, "width": 0.5}},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": high - middle,
                    "arrayminus": middle - low,
                    "thickness": 1,
                },
                customdata=[[step, len(norms)] for step, norms in sides[side]],
                hovertemplate=f"carry in {side}, step %{{customdata[0]}}"
                "<br>median norm %{y:.4g} over %{customdata[1]} rows<extra></extra>",
            )
        )
