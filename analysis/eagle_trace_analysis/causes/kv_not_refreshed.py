"""Draft keys kept where the verify round should have replaced them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual, not_tested
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Draft keys kept where the verify round should have replaced them."""
    rounds = context.serve.table("rounds")
    if not rounds.num_rows:
        return not_tested("the serve trace holds no verify rounds", "record the serve side with more than one round")

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        stale = left_by_drafts(context)
        for fresh in (True, False):
            view = View(replay.recorded, window=replay.form.window, stale=stale, fresh_in_call=fresh)
            words = f"{len(stale)} positions still holding the keys of the draft step that guessed them"
            yield Hypothesis(words, replay.varied(view=view))

    return counterfactual(
        context,
        context.layer_sites("attn.context"),
        other,
        lambda _: (
            "the server must run the draft over the accepted tokens after each verify round (draft extend) and "
            "overwrite their keys and values; update it, or report it"
        ),
    )


def left_by_drafts(context: Context) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
    """For each (prompt, root) whose token a draft step guessed right: (root, path) of that step's row.

    The step s row below root r is fed the token at place r + 1 + s and writes the cache at position r + s, which is
    the place of the step-0 row at root r + s.
    """
    rows = context.serve.rows
    tokens = {
        int(number): ids
        for number, ids in zip(context.serve.prompts["prompt_id"], context.serve.prompts["token_ids"], strict=True)
    }
    found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    paths = rows.paths()
    for row in np.flatnonzero((rows.step > 0) & rows.own_path):
        prompt, root, path = int(rows.prompt_id[row]), int(rows.root[row]), paths[row]
        true = tokens.get(prompt, ())[root + 2 : root + 2 + len(path)]
        if len(true) == len(path) and tuple(int(token) for token in true) == path:
            found[prompt, root + len(path)] = root, path
    return found


CAUSE = Cause(
    "kv-not-refreshed",
    "8 to 15 % lower accept length; the first round is fine.",
    "Attention recomputed with the keys that draft steps left behind at accepted positions.",
    "Run the draft over accepted tokens after each verify round.",
    ("layer.0.attn.context",),
    check,
    of_server=True,
)
