"""A token beside its own feature, where the one behind it belongs."""

from __future__ import annotations

import numpy as np

from eagle_trace.reader import Trace
from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import channel_error
from eagle_trace_analysis.evidence.misplaced import misplaced


def lag(trace: Trace) -> tuple[int, int, int]:
    """Of step-0 rows: how many there are, how many are fed x[root + 1], how many x[root]."""
    rows = trace.rows
    at = np.flatnonzero(rows.step == 0)
    right = wrong = count = 0
    for number, ids in zip(trace.prompts["prompt_id"], trace.prompts["token_ids"], strict=True):
        mine = at[rows.prompt_id[at] == number]
        tokens = np.asarray(ids)
        mine = mine[rows.root[mine] + 1 < len(tokens)]
        count += len(mine)
        right += int((rows.token_id[mine] == tokens[rows.root[mine] + 1]).sum())
        wrong += int((rows.token_id[mine] == tokens[rows.root[mine]]).sum())
    return count, right, wrong


def is_shifted(count: int, right: int, wrong: int) -> bool:
    """Whether (nearly) all rows are fed the token of their own feature and not the one behind it."""
    return bool(count) and right < count and wrong > 0.9 * count


def check(context: Context) -> Outcome:
    """x_i beside g_i instead of x_{i+1}: in the tokens, or in the features."""
    said = []
    for side, trace in (("training", context.train), ("serving", context.serve)):
        count, right, wrong = lag(trace)
        said.append(f"{right:,} of {count:,} rows of {side} are fed the token behind their feature")
        if is_shifted(count, right, wrong):
            evidence = (
                f"{wrong:,} of {count:,} rows of {side} are fed x[root] beside feature g[root], {right:,} x[root + 1]"
            )
            return confirmed(evidence, f"shift the tokens of {side} by one: g[i] goes with x[i + 1]", "token")
    features = context.features
    prompts_equal = not context.unequal_prompts
    if features is not None and prompts_equal and not features.single and not features.healthy:
        shifts = []
        for shift in (-1, 1):
            y = features.train_at(0, shift=shift)
            rows = np.flatnonzero(np.isfinite(y).all(axis=1))
            if len(rows) >= 2 and y.shape == features.served[0].shape:
                shifts.append((channel_error(features.served[0][rows], y[rows]), shift))
        if shifts and (best := min(shifts))[0] <= features.allowed[features.sites[0]]:
            evidence = f"the server's feature at root p is training's at p {best[1]:+d} (channel error {best[0]:.1e})"
            return confirmed(
                evidence, "shift one side's features by one row: g[i] goes with x[i + 1]", "target.hidden.0"
            )
    if (found := misplaced(context)) is not None and found.shift:
        fix = "shift one side's features by one row: g[i] goes with x[i + 1]"
        return confirmed(found.words, fix, "target.hidden.0")
    return ruled_out("; ".join(said))


CAUSE = Cause(
    "input-shift",
    "Accept length near 1.",
    "Token of every row against the prompt's at that place; features of one side against the other's one row away.",
    "Feed x[i + 1] beside g[i].",
    ("token", "target.hidden.0"),
    check,
)
