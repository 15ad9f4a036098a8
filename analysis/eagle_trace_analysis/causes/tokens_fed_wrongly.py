"""Tokens that the server fed its draft, against those that were due by its own books."""

from __future__ import annotations

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.causes.chunk_end_token import chunk_lasts
from eagle_trace_analysis.causes.input_shift import is_shifted, lag
from eagle_trace_analysis.comparison.topk import unmapped
from eagle_trace_analysis.evidence.books import UNKNOWN, UNKNOWN_DUE, Bool, Fed, Int, ends_of_forwards
from eagle_trace_analysis.evidence.context import Context

#: share of the wrong rows that a source of their tokens must explain
MOSTLY = 0.8


def check(context: Context) -> Outcome:
    """Tokens fed against the server's own books."""
    fed = Fed.of(context.serve)
    known = int((fed.due >= 0).sum())
    if not known:
        return not_tested(*UNKNOWN_DUE)
    wrong = fed.wrong
    if context.confirms("chunk-end-token"):
        wrong = np.setdiff1d(wrong, chunk_lasts(fed))
        if not len(wrong):
            return ruled_out("the rows at the end of a prompt's chunk, and no others: see chunk-end-token")
    if not len(wrong) and (raw := unmapped(context.serve)):
        fix = (
            "the server must map the draft's ids to target ids (d2t, its hot_token_id) at every draft step: update it, "
        )
        return confirmed("; ".join(one.words for one in raw), fix + "or report it", "token")
    if not len(wrong):
        return ruled_out(f"all {known:,} rows are fed what the target committed (step 0) or the draft proposed")
    if is_shifted(*lag(context.serve)):
        return ruled_out("(nearly) every row is fed the token of its own feature: see input-shift")
    marked = np.zeros(len(fed.rows), dtype=np.bool_)
    marked[wrong] = True
    said = [
        f"{int((marked & here).sum())} of {int(here.sum())} rows {kind}"
        for kind, here in fed.kinds()
        if (marked & here).any()
    ]
    first = int(wrong[np.lexsort((fed.rows.root[wrong], fed.rows.step[wrong]))[0]])
    evidence = f"{', '.join(said)} are fed another token than the one due"
    evidence += (source := _source(fed, wrong)) and f": {source}"
    evidence += f"; first at root {fed.rows.root[first]}, step {fed.rows.step[first]}: {fed.rows.token_id[first]}, due "
    evidence += f"was {fed.due[first]}"
    fix = (
        "the server must feed x[root + 1], the token that its target committed, beside feature g[root], and at draft "
        "steps the token that its draft proposed: update it, or report it with these rows"
    )
    return confirmed(evidence, fix, "token")


def _source(fed: Fed, wrong: Int) -> str:
    """What was fed instead, if nearly all wrong rows have it in common; else nothing."""
    rows = fed.rows
    token, place = rows.token_id[wrong], rows.root[wrong].astype(np.int64) + 1 + rows.step[wrong]

    def at(offset: int) -> Int:
        found = np.full(len(wrong), UNKNOWN, dtype=np.int64)
        for n, row in enumerate(wrong):
            tokens = fed.committed.get(int(rows.prompt_id[row]), ())
            if offset < 0 and rows.step[row] > 1:
                found[n] = rows.path[row, rows.step[row] - 2]
            elif 0 <= place[n] + offset < len(tokens):
                found[n] = tokens[place[n] + offset]
        return found

    sources = (
        ("the token before it", token == at(-1)),
        ("the token behind it", token == at(1)),
        ("the token due in another request of the same forward", _due_elsewhere(fed, wrong)),
        ("the last token of the prompt", token == fed.last_of_prompt(wrong)),
        (f"always token {token[0]}", token == token[0]),
    )
    for words, held in sources:
        count = int(held.sum())
        if count >= MOSTLY * len(wrong) and (count > 1 or words.startswith("the")):
            return words if count == len(wrong) else f"{words} ({count} of {len(wrong)})"
    return ""


def _due_elsewhere(fed: Fed, wrong: Int) -> Bool:
    """Which wrong rows were fed the token that the row at their place in another request of the forward was due.

    At their place: the last row of the request in an extend, or the same draft step. Others have no place that the
    requests of a forward share, and with few tokens about, a long prefill holds any of them by chance.
    """
    rows, due = fed.rows, fed.due
    placed = ends_of_forwards(rows) | (rows.step > 0)
    held: dict[tuple[int, int, int], set[int]] = {}
    for row in np.flatnonzero(placed & np.isin(rows.call_id, rows.call_id[wrong])):
        key = int(rows.call_id[row]), int(rows.step[row]), int(due[row])
        held.setdefault(key, set()).add(int(rows.prompt_id[row]))

    def elsewhere(row: int) -> bool:
        key = int(rows.call_id[row]), int(rows.step[row]), int(rows.token_id[row])
        return bool(placed[row] and held.get(key, set()) - {int(rows.prompt_id[row])})

    return np.array([elsewhere(int(row)) for row in wrong])


CAUSE = Cause(
    "tokens-fed-wrongly",
    "Lower accept length on prompts and answers that are the same on both sides.",
    "Token fed to every row of the server against what its own target committed and its own draft proposed.",
    "Update the server, or report the rows: which they are, and which token they are fed instead.",
    ("token",),
    check,
    of_server=True,
)
