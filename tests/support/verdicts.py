"""What a diff of a planted fault must say."""

from __future__ import annotations

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
