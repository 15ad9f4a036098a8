"""How results show themselves in a notebook: the answer, small, without plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_trace_analysis.report import sections
from eagle_trace_analysis.report.causes import CONFIRMED, NOT_TESTED, RULED_OUT, CauseView, causes_of, views

if TYPE_CHECKING:
    from eagle_trace_analysis.comparison.result import Diff
    from eagle_trace_analysis.diagnosis.diagnose import Diagnosis

_COLORS = {
    "agree": "#00785a",
    "diverged": "#b84a00",
    "incomparable": "#8a6d00",
    CONFIRMED: "#b84a00",
    RULED_OUT: "#00785a",
    NOT_TESTED: "#6b7280",
}
_LISTED = 8
_CELL = "text-align:left;padding:2px 14px 2px 0;vertical-align:top"


def diff_html(diff: Diff) -> str:
    """Verdict, first divergence with both sides, coverage, accept length, and the first sites that differ."""
    accept = diff.accept_length
    facts = {
        "in words": sections.lead(diff),
        "rows": f"{diff.coverage.matched} matched ({diff.coverage.share:.0%} of the comparable serve rows)",
        "accept length": "not known"
        if accept.observed is None
        else f"{accept.observed:.2f} tokens per round, bonus included",
        "tolerance": sections.e(diff.tolerance),
    }
    confirmed = [cause for cause in causes_of(diff) if cause.verdict == CONFIRMED]
    if confirmed:
        facts["cause"] = "<br>".join(f"<b>{sections.e(cause.name)}</b>: {sections.e(cause.fix)}" for cause in confirmed)
    rows = "".join(
        f'<tr><th style="{_CELL}">{name}</th><td style="{_CELL}">{words}</td></tr>' for name, words in facts.items()
    )
    differ = [result for result in diff.sites if result.verdict == "diverged"]
    listed = "".join(
        f'<tr><td style="{_CELL}"><code>{sections.e(one.site)}</code></td><td style="{_CELL}">step {one.step}</td>'
        f'<td style="{_CELL}">{sections.e(one.divergence.why if one.divergence else "")}</td></tr>'
        for one in differ[:_LISTED]
    )
    more = f"<p>and {len(differ) - _LISTED} more sites and steps differ</p>" if len(differ) > _LISTED else ""
    head = f"<p>{_badge(diff.verdict)} <b>{sections.headline(diff)}</b></p>"
    return diff.roles.say_html(f"<div>{head}<table>{rows}</table><table>{listed}</table>{more}</div>")


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Every cause: what was confirmed with its fix, what was ruled out, what was not tested."""
    found = views(diagnosis)
    if not found:
        return "<div>no cause was looked at</div>"
    rows = "".join(_cause(cause) for cause in found)
    return f"<div><table>{rows}</table></div>"


def _cause(cause: CauseView) -> str:
    words = "<br>".join(sections.e(line) for line in cause.evidence)
    if cause.fix:
        words += f"<br><b>{'To test it' if cause.verdict == NOT_TESTED else 'Fix'}:</b> {sections.e(cause.fix)}"
    return (
        f'<tr><td style="{_CELL}">{_badge(cause.verdict)}</td><td style="{_CELL}"><b>{sections.e(cause.name)}</b></td>'
        f'<td style="{_CELL}">{words}</td></tr>'
    )


def _badge(words: str) -> str:
    color = _COLORS.get(words, "#6b7280")
    style = f"background:{color};color:white;border-radius:9px;padding:1px 9px;white-space:nowrap"
    return f'<span style="{style}">{sections.e(words)}</span>'
