"""A finished diff or check as a list of cases, each with one outcome: what JUnit and SARIF are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_trace.store import is_url
from eagle_trace_analysis.checkpoint.finding import CheckResult, Status
from eagle_trace_analysis.comparison.result import Diff, SiteResult

Outcome = Literal["passed", "failed", "warned", "skipped", "error"]


@dataclass(frozen=True)
class Case:
    """One thing that was looked at.

    Attributes:
        name: what, such as a site or a check.
        outcome: ``error`` if it could not be looked at although it had to be.
        text: the evidence, one sentence or a few.
        rule: which kind of fault it speaks of: a cause, a kind of divergence, a check.
        fix: what to do; empty if nothing is.
        place: file or folder that it speaks of; empty if none.
    """

    name: str
    outcome: Outcome
    text: str
    rule: str
    fix: str = ""
    place: str = ""


@dataclass(frozen=True)
class Suite:
    """All cases of one command.

    Attributes:
        name: ``eagle-trace diff`` or ``eagle-trace check``.
        summary: its verdict in a sentence.
    """

    name: str
    summary: str
    cases: tuple[Case, ...]

    def count(self, outcome: Outcome) -> int:
        """How many cases ended so."""
        return sum(case.outcome == outcome for case in self.cases)


_OF_STATUS: dict[Status, Outcome] = {
    Status.PASS: "passed", Status.WARN: "warned", Status.FAIL: "failed", Status.SKIP: "skipped",
}  # fmt: skip


def cases_of_check(result: CheckResult) -> Suite:
    """One case per check."""
    config = f"{result.draft}/config.json" if is_url(result.draft) else str(Path(result.draft) / "config.json")
    cases = tuple(
        Case(one.name, _OF_STATUS[one.status], one.evidence, one.cause or one.name, one.fix, config)
        for one in result.findings
    )
    failed = result.count(Status.FAIL)
    return Suite("eagle-trace check", f"{result.draft}: {failed} of {len(cases)} checks failed", cases)


def cases_of_diff(diff: Diff) -> Suite:
    """One case per site at the step that decides, and one per thing that a gate asks for; causes come with their fix.

    A site fails where the two part; what diverges because of that is skipped and says so. With a baseline, a site
    fails for what is worse than it, and a divergence that the baseline has too is a warning.
    """
    place = str(diff.traces["serve"].get("path") or "")
    if diff.incomparable is not None:
        case = Case("comparison", "error", diff.incomparable, "incomparable", place=place)
        return Suite("eagle-trace diff", f"could not be compared: {diff.incomparable}", (case,))
    cases = [*_of_gate(diff, place), *_of_causes(diff, place), *_of_sites(diff, place)]
    return Suite("eagle-trace diff", _summary(diff), tuple(cases))


def _summary(diff: Diff) -> str:
    first = diff.first_divergence
    return diff.verdict if first is None else f"diverged: first at {first.site}, step {first.step} ({first.kind})"


def _of_gate(diff: Diff, place: str) -> list[Case]:
    gate = diff.gate
    if gate is None:
        return []
    found = [
        Case(f"gate: {_where(one.site, one.step) or one.name}", "failed", one.text, one.name, place=place)
        for one in gate.failures
    ]
    if gate.unknown is not None:
        found.append(Case("gate: accept-length", "error", gate.unknown, "accept-length", place=place))
    elif gate.max_drop is not None and not any(one.name == "accept-length" for one in gate.failures):
        text = f"within {gate.max_drop:.1%} of what is expected"
        found.append(Case("gate: accept-length", "passed", text, "accept-length", place=place))
    return found


def _of_causes(diff: Diff, place: str) -> list[Case]:
    """Confirmed causes: they fail as the sites do, and a continuous build shows their fix first."""
    outcome: Outcome = "failed" if diff.exit_status == 1 else "warned"
    confirmed = diff.diagnosis.confirmed if diff.diagnosis is not None else ()
    return [Case(f"cause: {one.cause}", outcome, one.evidence, one.cause, one.fix or "", place) for one in confirmed]


def _of_sites(diff: Diff, place: str) -> list[Case]:
    worst: dict[str, SiteResult] = {}
    for result in diff.sites:
        known = worst.get(result.site)
        if known is None or _rank(result) > _rank(known):
            worst[result.site] = result
    tolerated = diff.gate is not None and diff.gate.baseline is not None
    return [_of_site(result, place, known=tolerated) for result in worst.values()]


def _of_site(result: SiteResult, place: str, *, known: bool) -> Case:
    name = _where(result.site, result.step)
    if result.divergence is not None and result.frontier:
        outcome: Outcome = "warned" if known else "failed"
        return Case(name, outcome, result.divergence.why, f"{result.divergence.kind}-diverged", place=place)
    if result.divergence is not None:
        return Case(name, "skipped", "it is computed from what diverged before it", "behind", place=place)
    if result.reason is not None:
        return Case(name, "skipped", result.reason, "not-compared", place=place)
    return Case(name, "passed", "equal within tolerance", "agree", place=place)


def _rank(result: SiteResult) -> int:
    if result.frontier:
        return 3
    return {"diverged": 2, "agree": 1, "not compared": 0}[result.verdict]


def _where(site: str | None, step: int | None) -> str:
    if site is None:
        return ""
    return site if step is None else f"{site}, step {step}"
