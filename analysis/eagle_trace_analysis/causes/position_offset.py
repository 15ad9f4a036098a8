"""Positions that differ by a constant: no fault under a rotary embedding."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context


def check(context: Context) -> Outcome:
    """Positions that differ by a constant."""
    shifted = next((note.text for note in context.diff.benign if note.name == "position-offset"), None)
    if shifted is not None:
        same = [one for one in context.results("layer.0.attn.context") if one.verdict == "agree"]
        return ruled_out(f"{shifted}" + (f"; attention's output agrees at {len(same)} steps" if same else ""))
    found = context.divergence("position")
    if found is not None:
        return ruled_out(f"positions differ, and not by a constant: {found.why}")
    if not context.results("position"):
        return not_tested("no rows in common", "record both sides on the same prompts (--replay)")
    rows = len(context.serve.rows)
    return ruled_out(f"positions are equal ({rows:,} rows served)")


CAUSE = Cause(
    "position-offset",
    "Nothing under RoPE: positions differ by a constant.",
    "Never confirmed: the constant is named, and attention's output agrees.",
    "Nothing to fix.",
    (),
    check,
)
