"""Comparison, diagnosis and gate of two traces in one call, for whoever offers all three."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle_trace.errors import IncomparableError
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.diff import MINIMUM_SHARE, diff
from eagle_trace_analysis.comparison.fold import Executor
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.tolerance import FACTOR
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed
from eagle_trace_analysis.gate.gate import gated


@dataclass(frozen=True)
class Compare:
    """How to compare; called with the reference and the other trace, and with a baseline or without.

    Attributes:
        minimum_share, executor, floors, tolerance: those of `eagle_trace_analysis.diff`.
        max_drop: that of `gate.gated`.
        diagnose: whether to look for the cause.
        folders: of the reference's draft, of the other's, and of the target, where not those of the traces.
    """

    minimum_share: float = MINIMUM_SHARE
    executor: Executor | None = None
    floors: Trace | None = None
    tolerance: float = FACTOR
    max_drop: float | None = None
    diagnose: bool = True
    folders: tuple[Path | None, Path | None, Path | None] = (None, None, None)

    def __call__(self, reference: Trace, other: Trace, *, baseline: Trace | None = None) -> Diff:
        """The finished diff.

        Raises:
            IncomparableError: floors or baseline are of no use here.
            TraceError: a file cannot be read.
        """
        if baseline is not None:
            _refuse_other_kind(baseline, other)
        before = self._compared(reference, baseline) if baseline is not None else None
        now = self._compared(reference, other)
        return gated(now, max_drop=self.max_drop, baseline=before, tolerance=self.tolerance)

    def _compared(self, reference: Trace, other: Trace) -> Diff:
        found = diff(
            reference, other, minimum_share=self.minimum_share, executor=self.executor, floors=self.floors,
            tolerance=self.tolerance,
        )  # fmt: skip
        # the baseline too: what is proved of steps counts as a divergence
        return diagnosed(found, reference, other, Checkpoints(*self.folders)) if self.diagnose else found


def _refuse_other_kind(baseline: Trace, other: Trace) -> None:
    """A baseline says how far this host was from the reference, which no other host does."""
    was, now = ((one.manifest.side, one.manifest.host) for one in (baseline, other))
    if was != now:
        raise IncomparableError(
            f"the baseline {baseline.path} is a {was[0]} trace of {was[1]}, and {other.path} a {now[0]} trace of "
            f"{now[1]}: give a baseline recorded on {now[1]} in the same way"
        )
