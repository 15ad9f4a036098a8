"""The ladder: every site in forward order and how far apart the two sides are there."""

from __future__ import annotations

import math
from typing import Any

from eagle_trace.sites import known_site
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import Diff, SiteResult
from eagle_trace_analysis.plots import style

_STATISTICS = {
    "rho_max": "largest relative error of a row",
    "rho_median": "median relative error of a row",
    "channel_median": "median relative error of a channel",
}
_EXPECTED = 1e-7


def ladder(diff: Diff, statistic: str = "rho_max") -> Any:
    """Error of every site in forward order, one line per step, over the tolerance band; the first divergence is marked.

    Args:
        diff: a finished diff.
        statistic: ``rho_max``, ``rho_median`` or ``channel_median``.

    Returns:
        A plotly figure. Sites read top to bottom as the forward computes them; errors are relative (no unit) on a log
        axis. A site of integers shows the share of its rows that differ.
    """
    if statistic not in _STATISTICS:
        raise ValueError(f"statistic is one of {', '.join(_STATISTICS)}, not {statistic!r}")
    sites = style.forward_order(result.site for result in diff.sites)
    row = 22 if len(sites) <= 40 else 15
    made = style.figure(
        "Where the two sides part: error at every site, in forward order",
        _subtitle(diff),
        height=150 + row * max(4, len(sites)),
    )
    if not any(result.metrics or result.divergence for result in diff.sites):
        return style.say(made, diff.incomparable or "no site was compared")
    low, high = _limits(diff, statistic)
    _add_band(made, diff, sites, statistic, low)
    for number, step in enumerate(sorted({result.step for result in diff.sites})):
        results = [result for result in diff.sites if result.step == step]
        _add_step(made, results, step, number, statistic, low, high)
    _mark_first(made, diff, statistic, low, high)
    axis = style.log_ticks(low / 1.4, high * 1.4)
    ticks = [
        (low, "0"),
        *((at, label) for at, label in zip(axis["tickvals"], axis["ticktext"], strict=True) if at > 2.5 * low),
    ]
    axis |= {"tickvals": [at for at, _ in ticks], "ticktext": [label for _, label in ticks]}
    made.update_xaxes(
        **axis,
        title={"text": f"{_STATISTICS[statistic]} (serve against train, no unit)"},
    )
    made.update_yaxes(
        categoryorder="array",
        categoryarray=sites[::-1],
        range=[-0.6, len(sites) - 0.4],
        tickmode="array",
        tickvals=sites,
        ticktext=[_tick(name, diff) for name in sites],
        tickfont={"size": 11 if row > 16 else 9},
    )
    return made


def _subtitle(diff: Diff) -> str:
    first = diff.first_divergence
    if diff.incomparable is not None:
        return "the two traces could not be compared"
    if first is None:
        return "the sides agree: every error lies inside the tolerance (green)"
    return f"first divergence at {first.site}, step {first.step} ({first.kind}); green is what rounding may do"


def _tick(name: str, diff: Diff) -> str:
    first = diff.first_divergence
    return f"<b>▸ {style.text(name)}</b>" if first is not None and first.site == name else style.text(name)


def _figure(result: SiteResult, statistic: str) -> float | None:
    """What is drawn of a site: its error, or the share of rows that differ; None if it has no number."""
    metrics = result.metrics
    if isinstance(metrics, IdMetrics):
        return metrics.differing / metrics.rows if metrics.rows else 0.0
    if isinstance(metrics, Metrics):
        value: float | None = getattr(metrics, statistic)
        return value if value is None or not math.isnan(value) else math.inf
    return None


def _limits(diff: Diff, statistic: str) -> tuple[float, float]:
    values = [value for result in diff.sites if (value := _figure(result, statistic))]
    finite = [value for value in values if math.isfinite(value)]
    # what is copied, not computed, is allowed nothing
    allowed = [one for result in diff.sites if result.tolerance and (one := result.tolerance.allowed[statistic])]
    low = min([*finite, *allowed, 1.0], default=_EXPECTED) / 5
    high = max([*finite, *allowed, 1.0]) * 3
    return low, high


def _add_band(made: Any, diff: Diff, sites: list[str], statistic: str, low: float) -> None:
    go = style.graph_objects()
    allowed: dict[str, float] = {}
    for result in diff.sites:
        if result.tolerance is not None:
            allowed.setdefault(result.site, result.tolerance.allowed[statistic])
    names = [name for name in sites if allowed.get(name)]
    if not names:
        return
    made.add_trace(
        go.Bar(
            y=names,
            x=[allowed[name] - low / 10 for name in names],
            base=low / 10,
            orientation="h",
            width=1.0,
            marker={"color": style.BAND, "line": {"width": 0}},
            name="within tolerance",
            hoverinfo="skip",
        )
    )


def _add_step(
    made: Any, results: list[SiteResult], step: int, number: int, statistic: str, low: float, high: float
) -> None:
    go = style.graph_objects()
    drawn = [result for result in results if result.verdict != "not compared"]
    color = style.STEP_COLORS[number % len(style.STEP_COLORS)]
    symbol = style.STEP_SYMBOLS[number % len(style.STEP_SYMBOLS)]
    x: list[float] = []
    symbols, fills, sizes, labels = [], [], [], []
    for result in drawn:
        value = _figure(result, statistic)
        missing = value is None
        x.append(high if missing or math.isinf(value or 0.0) else max(value or 0.0, low))
        diverged = result.verdict == "diverged"
        symbols.append("x" if missing else symbol)
        fills.append(color if diverged else "white")
        sizes.append(9 if diverged else 7)
        labels.append(_hover(result, value))
    y = [result.site for result in drawn]
    shared = {"y": y, "legendgroup": step}
    faint = {"mode": "lines", "line": {"color": color, "width": 1.2}, "opacity": 0.35}
    silent = {"hoverinfo": "skip", "showlegend": False}
    made.add_trace(go.Scatter(x=_joined(drawn, x, statistic), **faint, **silent, **shared))
    marker = {"symbol": symbols, "size": sizes, "color": fills, "opacity": 1, "line": {"color": color, "width": 1.6}}
    made.add_trace(
        go.Scatter(
            x=x,
            mode="markers",
            name=f"step {step}",
            customdata=labels,
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
            marker=marker,
            **shared,
        )
    )
    beside = {"text": [_beside(result) for result in drawn], "textfont": {"size": 11, "color": style.MUTED}}
    made.add_trace(go.Scatter(x=x, mode="text", textposition="middle left", **beside, **silent, **shared))


def _joined(drawn: list[SiteResult], x: list[float], statistic: str) -> list[float | None]:
    """`x` with gaps where a line would lead to something that is no error."""
    return [
        one if isinstance(result.metrics, Metrics) and _figure(result, statistic) is not None else None
        for one, result in zip(x, drawn, strict=True)
    ]


def _beside(result: SiteResult) -> str:
    """Both sides' shapes, beside a site that has no number because they differ."""
    one = result.divergence
    if one is None or one.kind not in ("shape", "presence"):
        return ""
    sides = [
        f"[{', '.join(map(str, facts['shape']))}]" if facts.get("shape") else "absent"
        for facts in (one.train, one.serve)
    ]
    return style.text(f"{sides[0]} in training, {sides[1]} in serving   ")


def _hover(result: SiteResult, value: float | None) -> str:
    lines = [f"<b>{style.text(result.site)}</b>, step {result.step}: {result.verdict}"]
    if (site := known_site(result.site)) is not None:
        lines.append(f"<i>{style.text(site.meaning)}</i>")
    metrics = result.metrics
    if isinstance(metrics, IdMetrics):
        lines.append(f"{metrics.differing} of {metrics.rows} rows differ")
    elif isinstance(metrics, Metrics):
        allowed = result.tolerance.allowed if result.tolerance else {}
        lines.append(f"rows compared: {metrics.rows}")
        for name, label in (
            ("rho_median", "median error"),
            ("rho_max", "largest error"),
            ("channel_median", "median channel"),
        ):
            if (one := getattr(metrics, name)) is not None:
                lines.append(f"{label}: {style.number(one)} ({style.number(allowed.get(name))} allowed)")
        if value == 0:
            lines.append("bit for bit the same")
    if result.divergence is not None:
        lines.append(style.text(style.shorten(result.divergence.why, 110)))
    return "<br>".join(lines)


def _mark_first(made: Any, diff: Diff, statistic: str, low: float, high: float) -> None:
    """A stripe over the first divergence, with its label where no marker stands."""
    first = diff.first_divergence
    if first is None:
        return
    made.add_hline(y=first.site, line={"color": style.RED, "width": 18}, opacity=0.16, layer="below")
    place: dict[str, Any] = {"x": 0, "xref": "paper", "xanchor": "left", "xshift": 6}
    value = next(
        (_figure(one, statistic) for one in diff.sites if (one.site, one.step) == (first.site, first.step)), None
    )
    if value is not None:
        at = math.log10(min(max(value, low), high))
        left = at > (math.log10(low) + math.log10(high)) / 2
        place = {"x": at, "xref": "x", "xanchor": "right" if left else "left", "xshift": -12 if left else 12}
    made.add_annotation(
        name="wide",
        y=first.site,
        yref="y",
        showarrow=False,
        text=f"<b>first divergence</b> ({first.kind})",
        font={"color": "#8a3a00", "size": 12},
        **place,
    )
