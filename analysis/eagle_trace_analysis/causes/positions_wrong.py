"""Positions that do not follow from the row: which kind of rows a server rotates by another position than it should."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context

Int = NDArray[np.int64]


def _kinds(rows: Rows) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    first = rows.step == 0
    yield "the prefill", first & (rows.round == 0)
    yield "the extends after verify rounds", first & (rows.round > 0)
    for step in np.unique(rows.step[~first]):
        yield f"draft step {step}", rows.step == step


def moved(rows: Rows) -> Int:
    """How far each row's position is from its place, root + step; int64 [T]."""
    return rows.position.astype(np.int64) - rows.root - rows.step


def _words(rows: Rows) -> list[str]:
    """Each kind of rows with how far its positions are off."""
    said, off = [], moved(rows)
    for kind, here in _kinds(rows):
        if here.any():
            low, high = int(off[here].min()), int(off[here].max())
            said.append(f"{kind} {low:+d}" if low == high else f"{kind} {low:+d} to {high:+d}")
    return said


def check(context: Context) -> Outcome:
    """Whether each side's positions are root + step and one constant a prompt."""
    if not context.results("position"):
        return not_tested("no rows in common", "record both sides on the same prompts (--replay)")
    divergence = next((one.divergence for one in context.results("position") if one.divergence), None)
    if divergence is None:
        return ruled_out(f"one constant a request between both sides ({len(context.serve.rows):,} rows served)")
    for side, trace in (("the server", context.serve), ("training", context.train)):
        rows = trace.rows
        off = moved(rows)
        order = np.lexsort((off, rows.prompt_id))
        same = rows.prompt_id[order][1:] == rows.prompt_id[order][:-1]
        bent = np.unique(rows.prompt_id[order][1:][same & (off[order][1:] != off[order][:-1])])
        if not len(bent):
            continue
        wrong = sum(int((mine != _main(mine)).sum()) for mine in (off[rows.prompt_id == one] for one in bent))
        evidence = (
            f"positions of {side} minus root + step, which must be one number for all rows of a request: "
            f"{', '.join(_words(rows))} ({wrong} of {len(rows)} rows unlike most of their request, in {len(bent)} of "
            f"{len(np.unique(rows.prompt_id))} requests)"
        )
        fix = (
            f"{side} must rotate the row of root p at draft step s by position p + s (and one constant for all rows of "
            "a request): prefill, extend after verify and draft steps alike; update it, or report it"
        )
        return confirmed(evidence, fix, "position")
    return ruled_out(f"on each side positions follow from the rows; between the two: {divergence.why}")


def _main(values: Int) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


CAUSE = Cause(
    "positions-wrong",
    "Lower accept length, or one that falls with the depth of the draft; numbers before the rotation agree.",
    "Position of every row against its root and step, in the prefill, the extends after verify and draft steps.",
    "Rotate the row of root p at step s by p + s, up to one constant a request.",
    ("position",),
    check,
)
