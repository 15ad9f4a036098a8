"""The table of sites in a terminal report: one row per site, at the step that decides."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_trace.printable import printable
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import Diff, SiteResult
from eagle_trace_analysis.report.ending import STYLE

_STYLE = STYLE | {"not compared": "dim"}


def print_sites(console: Console, diff: Diff, sites: str, most: int | None) -> None:
    """The table of sites, of at most `most` rows, and what it leaves out."""
    chosen = _chosen(diff)
    listed = [result for result in chosen if sites == "all" or result.verdict == "diverged"]
    shown = listed[:most]
    if shown:
        console.print(_table(shown))
    if len(shown) < len(listed):
        text = f"and {len(listed) - len(shown)} more sites that diverged; --verbose lists them"
        console.print(Text(text, style="dim"))
    if left := [result.verdict for result in chosen if result not in listed]:
        counts = [f"{left.count(verdict)} {verdict}" for verdict in ("agree", "not compared") if verdict in left]
        console.print(Text(f"sites: {' and '.join(counts)} at every step; diff --sites all lists them", style="dim"))
    console.print()


def _chosen(diff: Diff) -> list[SiteResult]:
    """One result a site: the first step at which it diverged, or else the one closest to what is allowed."""
    chosen: dict[str, SiteResult] = {}
    for result in diff.sites:
        known = chosen.get(result.site)
        if known is None or _rank(result) > _rank(known):
            chosen[result.site] = result
    return list(chosen.values())


def _table(results: Iterable[SiteResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("site", no_wrap=True, max_width=30)
    for name in ("step", "rows", "median", "max", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for result in results:
        metrics = result.metrics
        cells = ["", "", "", ""]
        if isinstance(metrics, Metrics):
            allowed = result.tolerance.allowed["rho_max"] if result.tolerance else 0.0
            cells = [
                str(metrics.rows),
                f"{metrics.rho_median:.1e}",
                f"{metrics.rho_max:.1e}",
                f"{allowed:.1e}",
            ]
        elif isinstance(metrics, IdMetrics):
            cells = [str(metrics.rows), "", f"{metrics.differing} differ", "0"]
        verdict = Text(result.verdict + (" *" if result.frontier else ""), style=_STYLE.get(result.verdict, ""))
        table.add_row(printable(result.site), str(result.step), *cells, verdict)
    return table


def _rank(result: SiteResult) -> tuple[int, float]:
    if result.verdict == "diverged":
        return 2, -result.step
    if result.verdict == "not compared":
        return 0, 0.0
    if isinstance(result.metrics, Metrics) and result.tolerance:
        return 1, result.metrics.rho_max / result.tolerance.allowed["rho_max"]
    return 1, 0.0
