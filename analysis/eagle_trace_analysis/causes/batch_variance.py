"""Kernels that round differently with batch and dtype: no fault."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, ruled_out
from eagle_trace_analysis.evidence.context import Context


def check(context: Context) -> Outcome:
    """Kernels that round differently with batch and dtype."""
    notes = [note.text for note in context.diff.benign if note.name in ("rounding", "tie-flips")]
    return ruled_out("; ".join(notes) if notes else "no site differs by rounding alone")


CAUSE = Cause(
    "batch-variance",
    "Nothing: numbers differ in the last digits with batch and dtype.",
    "Never confirmed: what is within tolerance is called rounding, with its size.",
    "Nothing to fix.",
    (),
    check,
)
