"""What a diff of a planted fault must say."""

from __future__ import annotations

from typing import Any

from eagle_trace_analysis import Diff


def expect(result: Diff, cause: str | None, site: str | None) -> None:
    """The first site, the one confirmed cause, and nothing left unexplained."""
    assert result.diagnosis is not None
    said = "\n".join(f"{one.verdict:10} {one.cause}: {one.evidence}" for one in result.diagnosis.causes)
    first = result.first_divergence
    assert (first.site if first else None) == site, f"{first}\n{said}"
    assert [one.cause for one in result.diagnosis.confirmed] == ([cause] if cause else []), said
    assert not result.diagnosis.unexplained, said
    assert all(one.fix for one in result.diagnosis.confirmed)


def first(result: Diff) -> tuple[str, int, str]:
    """Site, step and kind of the first divergence of a diff that has one."""
    assert result.verdict == "diverged", result.incomparable
    found = result.first_divergence
    assert found is not None
    return found.site, found.step, found.kind


def result_of(result: Diff, site: str, step: int = 0) -> Any:
    """What was found at a site and step."""
    return next(one for one in result.sites if (one.site, one.step) == (site, step))
