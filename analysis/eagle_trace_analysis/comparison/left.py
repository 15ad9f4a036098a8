"""How much of a comparison is left beside rows that routers may have sent to other experts by rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagle_trace_analysis.comparison.result import SiteResult

#: why such rows are skipped, in a coverage
SKIPPED = "router-tipped"


@dataclass(frozen=True)
class Left:
    """What of a site and step is compared beside rows that are left out.

    Attributes:
        site, step: where.
        rows, known: rows that are compared, and those that would be.
    """

    site: str
    step: int
    rows: int
    known: int

    @property
    def share(self) -> float:
        """Share of the rows that are compared."""
        return self.rows / self.known if self.known else 1.0

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.rows} of {self.known} rows of {self.site}, step {self.step}"


def least_left(results: Iterable[SiteResult]) -> Left:
    """The site and step of which the smallest share is compared beside the rows that are left out."""
    found = (
        Left(
            one.site, one.step, one.coverage.matched, one.coverage.matched + one.coverage.skipped_train.get(SKIPPED, 0)
        )
        for one in results
        if one.coverage is not None
    )
    return min(found, key=lambda one: one.share)
