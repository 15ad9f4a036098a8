"""How results show themselves in a notebook: the answer, small, without plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_trace_analysis.report.fill import fill
from eagle_trace_analysis.report.sections import lead

if TYPE_CHECKING:
    from eagle_trace_analysis.comparison.result import Diff
    from eagle_trace_analysis.diagnosis.diagnose import Diagnosis


def diff_html(diff: Diff) -> str:
    """Verdict, first divergence with both sides, coverage, accept length, and the first sites that differ."""
    accept = diff.accept_length.observed
    facts = {
        "in words": lead(diff),
        "rows": f"{diff.coverage.matched} matched ({diff.coverage.per_cent} of the comparable serve rows)",
        "accept length": "not known" if accept is None else f"{accept:.2f} tokens per round, bonus included",
        "tolerance": diff.tolerance,
    }
    cell = fill(
        "diff_cell.html",
        diff=diff,
        facts=facts,
        confirmed=diff.diagnosis.confirmed if diff.diagnosis is not None else (),
        differ=[result for result in diff.sites if result.divergence is not None],
    )
    return diff.roles.say_html(cell)


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Every cause: what was confirmed with its fix, what was ruled out, what was not tested."""
    return fill("causes_cell.html", causes=diagnosis.causes)
