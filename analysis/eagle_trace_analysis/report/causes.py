"""What a diagnosis says, in the form the reports show it; nothing if a diff was not diagnosed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_trace_analysis.result import Diff

CONFIRMED, RULED_OUT, NOT_TESTED = "confirmed", "ruled out", "not tested"
ORDER = (CONFIRMED, RULED_OUT, NOT_TESTED)


@dataclass(frozen=True)
class CauseView:
    """One cause as a report shows it.

    Attributes:
        name: the cause's name.
        verdict: ``confirmed``, ``ruled out`` or ``not tested``.
        evidence: sentences.
        fix: what to do about it; empty unless confirmed.
    """

    name: str
    verdict: str
    evidence: tuple[str, ...]
    fix: str = ""


def causes_of(diff: Diff) -> list[CauseView]:
    """Every cause that was looked at, confirmed ones first, else in the diagnosis' own order."""
    diagnosis = getattr(diff, "diagnosis", None)
    found = [_view(one) for one in getattr(diagnosis, "causes", None) or ()]
    return sorted(found, key=lambda cause: ORDER.index(cause.verdict) if cause.verdict in ORDER else len(ORDER))


def _view(one: Any) -> CauseView:
    verdict = str(getattr(one.verdict, "value", one.verdict)).replace("_", " ").replace("-", " ")
    return CauseView(str(one.name), verdict, _sentences(getattr(one, "evidence", None)), str(getattr(one, "fix", None) or ""))


def _sentences(evidence: Any) -> tuple[str, ...]:
    if evidence is None:
        return ()
    if isinstance(evidence, Mapping):
        return tuple(f"{name}: {value}" for name, value in evidence.items())
    if isinstance(evidence, Sequence) and not isinstance(evidence, str):
        return tuple(str(getattr(one, "text", one)) for one in evidence)
    return (str(getattr(evidence, "text", evidence)),)
