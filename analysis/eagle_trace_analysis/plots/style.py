"""What all plots share: colours that colour-blind readers tell apart, fonts, and plotly itself."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.errors import UsageError
from eagle_trace.extras import way_to
from eagle_trace.printable import printable
from eagle_trace.sites import known_sites
from eagle_trace_analysis.comparison.frontier import shape_order
from eagle_trace_analysis.pairing.roles import Roles

#: Okabe and Ito's palette
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B8A800",
)
INK, MUTED, GRID, BAND = "#1f2430", "#6b7280", "#e5e7eb", "#dcece6"
TRAIN, SERVE = BLUE, ORANGE
#: a step is told by colour and by shape
STEP_COLORS = (BLUE, RED, GREEN, PURPLE, SKY, YELLOW, INK)
STEP_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon")
#: blue below the tolerance, white at it, brown above
OVER_TOLERANCE = (
    (0.0, "#08519c"),
    (0.18, "#6baed6"),
    (0.333, "#f7f7f7"),
    (0.5, "#fdae61"),
    (0.75, "#d95f0e"),
    (1.0, "#7f2704"),
)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_AXIS = {"gridcolor": GRID, "zeroline": False, "linecolor": MUTED, "automargin": True, "title": {"standoff": 8}}
#: most points along an axis before neighbours are put together
MOST = 400


def graph_objects() -> Any:
    """plotly's graph objects.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise UsageError(f"plots and HTML reports need plotly: {way_to('notebook')}") from error
    return go


def figure(title: str, subtitle: str, *, height: int, **layout: Any) -> Any:
    """An empty figure in the house style."""
    made = graph_objects().Figure()
    made.update_layout(
        title={
            "text": f"<b>{text(title)}</b>",
            "subtitle": {"text": text(subtitle), "font": {"size": 12, "color": MUTED}},
            "font": {"size": 16, "color": INK},
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14},
        },
        height=height,
        margin={"l": 10, "r": 16, "t": 84, "b": 52},
        font={"family": FONT, "size": 12, "color": INK},
        template={"layout": {"xaxis": _AXIS | {"ticks": "outside", "tickcolor": GRID}, "yaxis": _AXIS}},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hoverlabel={
            "bgcolor": "white",
            "bordercolor": MUTED,
            "font": {"family": FONT, "size": 12, "color": INK},
            "align": "left",
        },
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
        **layout,
    )
    return made


def text(words: object) -> str:
    """Text for a plot: plotly reads a little HTML, which names and prompts must not be able to write."""
    return html.escape(printable(words), quote=False)


def shorten(words: str, length: int = 40) -> str:
    """`words` in at most `length` characters, the middle left out."""
    if len(words) <= length:
        return words
    head = (length - 1) // 2
    return f"{words[:head]}…{words[-(length - 1 - head) :]}"


def number(value: float | None) -> str:
    """A figure in three digits."""
    if value is None or np.isnan(value):
        return "–"
    return "infinite" if np.isinf(value) else f"{value:.3g}"


def forward_order(names: Iterable[str]) -> list[str]:
    """Names of sites in forward order, `fused` before its slices (as a diff judges them), unknown names last."""
    order = {site.name: index for index, site in enumerate(shape_order(known_sites()))}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))


def bins(count: int, most: int = MOST) -> list[NDArray[np.intp]]:
    """Indices 0..count-1 in at most `most` runs of equally many neighbours."""
    size = max(1, -(-count // most))
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """A log axis from `low` to `high` with ticks at powers of ten (plotly's own are set in another size)."""
    first, last = math.log10(low), math.log10(high)
    every = max(1, math.ceil((last - first) / 9))
    powers = [power for power in range(math.floor(first), math.ceil(last) + 1) if power % every == 0]
    values = [10.0**power for power in powers]
    labels = [_power(power) for power in powers]
    if last - first < 2.2:
        parts = [(a, b) for a in range(math.floor(first), math.ceil(last) + 1) for b in (1, 2, 5)]
        values = [b * 10.0**a for a, b in parts]
        labels = [_power(a) if b == 1 else f"{b * 10**a:g}" if 0 <= a <= 2 else f"{b}·{_power(a)}" for a, b in parts]
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": values,
        "ticktext": labels,
        "minor": {"showgrid": False},
        "range": [first - 0.02, last + 0.02],
    }


def _power(power: int) -> str:
    if 0 <= power <= 2:
        return str(10**power)
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def told(made: Any, roles: Roles) -> Any:
    """A figure whose words about training and serving are about the traces that it was drawn of."""
    if roles.usual:
        return made
    layout, drawn = made.layout.to_plotly_json(), [one.to_plotly_json() for one in made.data]
    made.layout = _told(layout, roles)
    for trace, facts in zip(made.data, drawn, strict=True):
        words = ("name", "hovertemplate", "text", "hovertext", "customdata", "colorbar", "header")
        trace.update({name: _told(facts[name], roles) for name in words if name in facts})
    return made


def _told(value: Any, roles: Roles) -> Any:
    if isinstance(value, str):
        return roles.say_html(value)
    if isinstance(value, dict):
        return {name: _told(one, roles) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_told(one, roles) for one in value]
    return value


def say(made: Any, words: str) -> Any:
    """`made` with one sentence in the middle, for when there is nothing to draw."""
    made.add_annotation(
        text=text(words), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14, "color": MUTED}
    )
    made.update_layout(height=190, grid=None)
    made.update_xaxes(visible=False)
    made.update_yaxes(visible=False)
    return made


def unique(values: Sequence[str]) -> list[str]:
    """`values` without repetitions, in order."""
    return list(dict.fromkeys(values))
