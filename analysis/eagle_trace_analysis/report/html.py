"""A diff as one HTML file that opens offline: the verdict first, then what stands behind it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from eagle_trace import __version__
from eagle_trace.errors import EagleTraceError
from eagle_trace.reader import Trace
from eagle_trace_analysis import plots
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.rowwise import open_traces
from eagle_trace_analysis.plots import style
from eagle_trace_analysis.report import sections
from eagle_trace_analysis.report.fill import fill


def require_plotly() -> None:
    """Find out before a comparison, not after it, that no HTML report can be written.

    Raises:
        UsageError: plotly is not installed.
    """
    style.graph_objects()


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

    drawn, lost = _figures(diff, train, serve)
    first = diff.first_divergence
    where = f" at {first.site}, step {first.step}" if first else ""
    # the exact text of each element: nothing else on the page may run or restyle it
    plotly, own, sheet = (_inline(text) for text in (get_plotlyjs(), _asset("report.js"), _asset("report.css")))
    return fill(
        "report.html",
        policy=_policy([plotly, own], sheet),
        map_styles=_map_styles(plotly),
        title=f"{diff.verdict}{where} – eagle-trace",
        version=__version__,
        verdict=diff.verdict,
        css=sheet,
        plotly=plotly,
        js=own,
        body=render_body(diff, drawn, lost),
        plots=drawn,
    )


@dataclass(frozen=True)
class Drawn:
    """A plot: its name, its height in pixels, and the figure as JSON that nothing inside it can end an element with."""

    name: str
    height: int
    json: str


def render_body(diff: Diff, drawn: Sequence[Drawn] = (), lost: str = "") -> str:
    """What a reader sees of the report, with places for the plots.

    Args:
        diff: a finished diff.
        drawn: its plots.
        lost: why plots are left out, if any are.
    """
    first = diff.first_divergence
    body = fill(
        "body.html",
        diff=diff,
        train=diff.traces["train"],
        serve=diff.traces["serve"],
        version=__version__,
        lead=sections.lead(diff),
        confirmed=diff.diagnosis.confirmed if diff.diagnosis is not None else (),
        forward=sections.forward(diff),
        cards=list(sections.cards(diff)),
        glossary=sections.GLOSSARY,
        first=first,
        first_why=sections.sentence(first.why) if first else "",
        sides=sections.sides(first) if first else [],
        plots=drawn,
        lost=lost,
        sites=[sections.site_row(result) for result in diff.sites],
        fates=sections.fates(diff),
        provenance=list(sections.provenance(diff)),
    )
    return diff.roles.say_html(body)


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


def _map_styles(plotly: str) -> list[str]:
    """Plotly's script styles maps, which this page has none of, unless it finds elements of these names."""
    return re.findall(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)', plotly)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _figures(diff: Diff, train: Trace | None, serve: Trace | None) -> tuple[list[Drawn], str]:
    """The plots, and why some are left out, if any are."""
    first = diff.first_divergence
    step = first.step if first is not None else 0
    drawn: list[tuple[str, Callable[[], Any]]] = [("ladder", lambda: plots.ladder(diff))]
    lost = ""
    try:
        a, b = open_traces(diff, train, serve)
    except EagleTraceError as error:
        lost = str(error)
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
    made = [(name, style.told(draw(), diff.roles)) for name, draw in drawn]
    return [Drawn(name, int(one.layout.height), _embed(one.to_json())) for name, one in made], lost


def _embed(text: str) -> str:
    """JSON that no text inside it can break out of its script element with."""
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
