"""What a diagnosis says, in the form the reports show it; nothing if a diff was not diagnosed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle_trace_analysis.comparison.result import Diff

if TYPE_CHECKING:
    from eagle_trace_analysis.diagnosis.diagnose import Diagnosis

CONFIRMED, RULED_OUT, NOT_TESTED = "confirmed", "ruled out", "not tested"
ORDER = (CONFIRMED, RULED_OUT, NOT_TESTED)


@dataclass(frozen=True)
class CauseView:
    """One cause as a report shows it.

    Attributes:
        name: the cause's name.
        verdict: ``confirmed``, ``ruled out`` or ``not tested``.
        evidence: sentences.
        fix: what to do about it, or (not tested) what would test it; may be empty.
        site: where it shows; may be empty.
    """

    name: str
    verdict: str
    evidence: tuple[str, ...]
    fix: str = ""
    site: str = ""


def causes_of(diff: Diff) -> list[CauseView]:
    """Every cause that was looked at; [] if the diff was not diagnosed."""
    return views(diff.diagnosis)


def views(diagnosis: Diagnosis | None) -> list[CauseView]:
    """The causes of a diagnosis: confirmed ones first, else in the diagnosis' own order."""
    found = [
        CauseView(
            one.cause,
            one.verdict.replace("_", " "),
            (one.evidence,) if one.evidence else (),
            one.fix or "",
            one.site or "",
        )
        for one in (diagnosis.causes if diagnosis is not None else ())
    ]
    return sorted(found, key=lambda cause: ORDER.index(cause.verdict))


def unexplained(diff: Diff) -> tuple[str, ...]:
    """What the diagnosis found wrong and no confirmed cause explains."""
    return () if diff.diagnosis is None else diff.diagnosis.unexplained
