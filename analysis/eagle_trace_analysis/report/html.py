"""A diff as one HTML file that opens offline: the verdict first, then what stands behind it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from string import Template
from typing import Any

from eagle_trace import __version__
from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace.extras import way_to
from eagle_trace.reader import Trace
from eagle_trace_analysis import plots
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.rowwise import open_traces
from eagle_trace_analysis.plots import style
from eagle_trace_analysis.report import sections

NEEDS_PLOTLY = f"the HTML report needs plotly: {way_to('notebook')}"


def require_plotly() -> None:
    """Find out before a comparison, not after it, that no HTML report can be written.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise UsageError(NEEDS_PLOTLY) from error


def render_html(diff: Diff, *, train: Trace | None = None, serve: Trace | None = None) -> str:
    """The whole report as the text of one HTML file, plotly's script included.

    Args:
        diff: a finished diff.
        train, serve: the traces, if they are no longer where the diff found them. A trace that cannot be opened
            any more costs only the plots that read it.

    Raises:
        UsageError: plotly is not installed.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    holders, data = _figures(diff, train, serve)
    body = "\n".join(
        [
            sections.header(diff, __version__),
            "<main>",
            sections.glossary(),
            sections.first_divergence(diff),
            sections.causes(diff),
            holders,
            sections.sites(diff),
            sections.rows(diff),
            sections.provenance(diff),
            "</main>",
            f"<footer><div>Written by eagle-trace {sections.e(__version__)}. "
            "This file needs no network and loads nothing.</div></footer>",
        ]
    )
    first = diff.first_divergence
    where = f" at {first.site}, step {first.step}" if first else ""
    # the exact text of each element: nothing else on the page may run or restyle it
    scripts = [_inline(get_plotlyjs()), _inline(_asset("report.js"))]
    sheet = _inline(_asset("report.css"))
    return Template(_asset("report.html")).substitute(
        policy=_policy(scripts, sheet),
        maps=_no_map_styles(scripts[0]),
        title=sections.e(f"{diff.verdict}{where} – eagle-trace"),
        version=sections.e(__version__),
        verdict=diff.verdict,
        css=sheet,
        plotly=scripts[0],
        js=scripts[1],
        body=diff.roles.say_html(body),
        figures=data,
    )


def _inline(text: str) -> str:
    """Text of a script or style element as a browser's parser hands it on: line ends are line feeds."""
    return "\n" + text.replace("\r\n", "\n").replace("\r", "\n") + "\n"


def _policy(scripts: list[str], style: str) -> str:
    """The page's content security policy: its own scripts and style by their hash, pictures that plotly makes.

    Plotly adds an empty style element, whose rules it then fills in, and sets style attributes, which can load nothing.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src-elem {_hash(style)} {_hash('')}",
            "style-src-attr 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _no_map_styles(plotly: str) -> str:
    """Plotly's script styles maps, which this page has none of, unless it finds that done: empty elements say so."""
    names = re.findall(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)', plotly)
    return "".join(f'<template id="{name}"></template>' for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _figures(diff: Diff, train: Trace | None, serve: Trace | None) -> tuple[str, str]:
    """Places for the plots, and their data as JSON in scripts that nothing runs."""
    first = diff.first_divergence
    step = first.step if first is not None else 0
    drawn: list[tuple[str, Callable[[], Any]]] = [("ladder", lambda: plots.ladder(diff))]
    lost = ""
    try:
        a, b = open_traces(diff, train, serve)
    except EagleTraceError as error:
        lost = f"<p class='note'>Plots that read the traces are left out: {sections.e(error)}</p>"
    else:
        drawn += [
            ("map", lambda: plots.error_map(diff, step=step, train=a, serve=b)),
            ("logits", lambda: plots.logits(diff, step=step, train=a, serve=b)),
            ("drafted", lambda: plots.drafted(diff, step=step, train=a, serve=b)),
            ("accept-length", lambda: plots.accept_length(diff, serve=b)),
            ("steps", lambda: plots.by_step(diff, train=a, serve=b)),
            ("weights", lambda: plots.weights(diff, train=a, serve=b)),
            ("features", lambda: plots.features(diff, train=a, serve=b)),
        ]
    if diff.incomparable is not None:
        drawn = [entry for entry in drawn if entry[0] in ("weights", "features", "accept-length")]
    holders, data = (
        ["<section id='plots'><h2>Plots</h2><p>Hover for figures; drag to zoom, double-click to zoom out.</p>", lost],
        [],
    )
    for name, draw in drawn:
        made = style.told(draw(), diff.roles)
        holders.append(
            f'<div class="plot"><div id="plot-{name}" data-figure="figure-{name}" '
            f'style="min-height:{int(made.layout.height)}px"></div></div>'
        )
        data.append(f'<script type="application/json" id="figure-{name}">{_embed(made.to_json())}</script>')
    return "".join([*holders, "</section>"]), "\n".join(data)


def _embed(text: str) -> str:
    """JSON that no text inside it can break out of its script element with."""
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
