"""The last row of each chunk of a prompt, fed the token that the whole prompt ends with."""

from __future__ import annotations

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.books import UNKNOWN_DUE, Fed, Int
from eagle_trace_analysis.evidence.context import Context


def check(context: Context) -> Outcome:
    """The last row of each chunk of a prompt, fed the token that the prompt ends with."""
    fed = Fed.of(context.serve)
    ends = np.flatnonzero(fed.chunk_ends & (fed.due >= 0))
    if not (fed.due >= 0).any():
        return not_tested(*UNKNOWN_DUE)
    if not len(ends):
        return ruled_out("no prompt was computed in chunks")
    wrong = np.intersect1d(ends, fed.wrong)
    if not len(wrong):
        return ruled_out(f"all {len(ends)} chunks of prompts end with the prompt's next token")
    last = chunk_lasts(fed)
    if len(last) < len(wrong):
        return ruled_out(
            f"{len(wrong)} of {len(ends)} chunks end with another token than the prompt's next one, of which "
            f"{len(last)} with the prompt's last: see tokens-fed-wrongly"
        )
    first = int(last[np.argmin(fed.rows.root[last])])
    evidence = (
        f"{len(last)} of {len(ends)} rows at the end of a prompt's chunk are fed the last token of the whole prompt in "
        f"place of the next one, and no such row another; first at root {fed.rows.root[first]}: "
        f"{fed.rows.token_id[first]}, due was {fed.due[first]}"
    )
    return confirmed(evidence, context.engine.WORDS.whole_prompts, "token")


def chunk_lasts(fed: Fed) -> Int:
    """The wrong rows at chunks' ends that were fed what the prompt ends with; none if another is wrong there."""
    wrong = np.intersect1d(np.flatnonzero(fed.chunk_ends), fed.wrong)
    last: Int = wrong[fed.rows.token_id[wrong] == fed.last_of_prompt(wrong)]
    return last


CAUSE = Cause(
    "chunk-end-token",
    "Lower accept length on prompts that are longer than a chunk of the prefill; short ones are fine.",
    "Token fed to the last row of each chunk of a prompt against the prompt's next token, and its last.",
    "Compute prompts in one piece, or update the server.",
    ("token",),
    check,
    of_server=True,
)
