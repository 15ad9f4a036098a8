"""What a draft step starts from: the carry of another row than the one that it goes on from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.metrics import row_errors
from eagle_trace_analysis.comparison.tolerance import UNIT
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.recorded import Recorded

Int = NDArray[np.int64]
Real = NDArray[Any]
#: rows that are looked for among other carries, and the carries tried
MOST_ROWS, MOST_CARRIES = 64, 512


def check(context: Context) -> Outcome:
    """Whether each draft step starts from the carry of the row above it, and if not, from whose."""
    replay = context.replay
    if replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    recorded = replay.recorded
    hidden, carry = recorded.values("hidden"), recorded.values("carry")
    if hidden is None or carry is None:
        return not_tested("hidden and carry were not recorded", RECORD_VALUES)
    parents = recorded.parents
    rows = np.flatnonzero((parents >= 0) & hidden.present)
    rows = rows[carry.present[parents[rows]]]
    if not len(rows):
        return not_tested("no draft step was recorded with the row above it", RECORD_VALUES)
    # the carry is handed on as it is: no more than a change of dtype lies between
    allowed = 4 * max(UNIT.get(recorded.trace.manifest.dtype, 0.0), UNIT["float32"])
    error = row_errors(hidden.values[rows], carry.values[parents[rows]])
    bad = rows[error > allowed]
    if not len(bad):
        return ruled_out(
            f"{len(rows)} rows of draft steps start from the carry of the row above (error {error.max():.1e} at most)"
        )
    which = ", ".join(
        f"{int((recorded.keys.step[bad] == step).sum())} of {int((recorded.keys.step[rows] == step).sum())} rows of "
        f"draft step {step}"
        for step in np.unique(recorded.keys.step[bad])
    )
    bad = bad[np.linspace(0, len(bad) - 1, min(len(bad), MOST_ROWS)).astype(np.int64)]
    found = _sources(recorded, hidden.values, bad, parents[bad], allowed)
    if 2 * len(found) < len(bad):
        return ruled_out(f"{which} do not start from the carry of the row above, and from no other carry of the trace")
    words = " and ".join(f"{name} ({found.count(name)} of {len(bad)})" for name in dict.fromkeys(found))
    return confirmed(
        f"{which} do not start from the carry of the row above but from {words}",
        "the server must hand to each row of a draft step the hidden state of the row it goes on from, in the order of "
        "its requests and branches: update it, or report it",
        "hidden",
    )


def _sources(recorded: Recorded, hidden: Real, bad: Int, parents: Int, allowed: float) -> list[str]:
    """For each bad row whose start is a carry of the trace, whose it is."""
    found = []
    for row, parent in zip(bad.tolist(), parents.tolist(), strict=True):
        candidates = _candidates(recorded.trace.rows, recorded.keys.take(np.array([row, parent])))
        carries = recorded.at("carry", candidates)
        if carries is None or not carries.present.any():
            continue
        at = np.flatnonzero(carries.present)
        error = row_errors(np.broadcast_to(hidden[row], (len(at), hidden.shape[1])), carries.values[at])
        best = int(at[error.argmin()])
        if error.min() > allowed:
            continue
        if candidates.prompt_id[best] != recorded.keys.prompt_id[row]:
            found.append("the carry of another request")
        elif candidates.step[best] < recorded.keys.step[parent]:
            found.append("a carry of an earlier step")
        elif candidates.step[best] == recorded.keys.step[parent] and candidates.root[best] == recorded.keys.root[row]:
            found.append("the carry of another branch")
        else:
            found.append("the carry of another root")
    return found


def _candidates(rows: Rows, pair: Rows) -> Rows:
    """Rows whose carry a row (the first of `pair`) may have been given in place of its parent's (the second).

    Its own prompt's rows of this round, the step-0 rows next to its root, and the rows of the parent's forward that
    belong to other requests.
    """
    prompt, root, call = int(pair.prompt_id[0]), int(pair.root[0]), int(pair.call_id[1])
    own = (rows.prompt_id == prompt) & (
        (rows.root == root) & (rows.step < pair.step[0]) | (rows.step == 0) & (np.abs(rows.root - root) <= 8)
    )
    other = (rows.call_id == call) & (rows.prompt_id != prompt)
    # of a prefill's many rows the last of each request is the one that is handed on
    ends = other & (rows.step == 0)
    if ends.sum() > MOST_CARRIES:
        at = np.flatnonzero(ends)
        order = at[np.lexsort((-rows.root[at], rows.prompt_id[at]))]
        first = order[np.unique(rows.prompt_id[order], return_index=True)[1]]
        other = np.zeros(len(rows), dtype=np.bool_)
        other[first] = True
    return rows.take(np.flatnonzero(own | other)[:MOST_CARRIES])


CAUSE = Cause(
    "carry-of-another-row",
    "Accept length falls with the depth of the draft, or with the number of requests in a batch.",
    "What each draft step starts from against the carry of the row above it, and against other rows' carries.",
    "Hand each row the hidden state of the row it goes on from.",
    ("hidden",),
    check,
)
