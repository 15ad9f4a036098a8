"""What a static check says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Outcome of one check. `skip` is no pass: the evidence says what was not given."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """One check's answer.

    Attributes:
        name: of the check.
        cause: id of the cause it speaks to, empty where there is none.
        evidence: what was read, in numbers.
        fix: what to do; empty unless it warns or fails.
    """

    name: str
    cause: str
    status: Status
    evidence: str
    fix: str = ""


@dataclass(frozen=True)
class TensorChange:
    """A tensor that differs from the reference's.

    Attributes:
        name: speculators' name of the tensor.
        change: ``added``, ``gone``, ``renamed``, ``shape``, ``dtype`` or ``values``.
        evidence: the figures.
        differing, elements: how many elements differ, of how many (values and dtype only).
        relative_l2: |new - old| / |old| (0 where not computed).
        largest: the largest absolute difference.
    """

    name: str
    change: str
    evidence: str
    differing: int = 0
    elements: int = 0
    relative_l2: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True)
class CheckResult:
    """All findings on a draft, in the order of the checks.

    Attributes:
        trainer: who trained the draft, and by what that was told; empty if nothing says so.
        fetched: bytes that were fetched of folders that lie elsewhere; None if all are local.
    """

    draft: str
    format: str
    findings: Sequence[Finding]
    target: str | None = None
    reference: str | None = None
    changes: Sequence[TensorChange] = field(default=())
    trainer: str = ""
    fetched: int | None = None
    #: the engine that it is judged for, with its release; why this one, where nobody named it
    engine: str = ""
    why: str = ""

    def count(self, status: Status) -> int:
        """How many findings have this status."""
        return sum(finding.status is status for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """1 if something failed, else 0 (warnings do not fail)."""
        return int(self.count(Status.FAIL) > 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "draft": self.draft,
            "format": self.format,
            "target": self.target,
            "reference": self.reference,
            "trainer": self.trainer or None,
            "fetched": self.fetched,
            "engine": self.engine,
            "engine_chosen": self.why or None,
            "counts": {status.value: self.count(status) for status in Status},
            "findings": [
                {
                    "name": f.name,
                    "cause": f.cause or None,
                    "status": f.status.value,
                    "evidence": f.evidence,
                    "fix": f.fix or None,
                }
                for f in self.findings
            ],
            "changes": [
                {
                    "name": c.name,
                    "change": c.change,
                    "evidence": c.evidence,
                    "differing": c.differing,
                    "elements": c.elements,
                    "relative_l2": c.relative_l2,
                    "largest": c.largest,
                }
                for c in self.changes
            ],
            "exit_status": self.exit_status,
        }


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names, shortened to the first few."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def passed(name: str, cause: str, evidence: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(name, cause, Status.PASS, evidence)


def skipped(name: str, cause: str, evidence: str) -> Finding:
    """A check that could not be made."""
    return Finding(name, cause, Status.SKIP, evidence)


def warned(name: str, cause: str, evidence: str, fix: str) -> Finding:
    """A check that found something to look at."""
    return Finding(name, cause, Status.WARN, evidence, fix)


def failed(name: str, cause: str, evidence: str, fix: str) -> Finding:
    """A check that found a fault."""
    return Finding(name, cause, Status.FAIL, evidence, fix)
