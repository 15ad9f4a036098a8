"""Cache slots that are missing, too many or too few: rows that the server never computed, and lengths miscounted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.causes.attention import errors_over_given, given_by_training
from eagle_trace_analysis.causes.base import (
    RECORD_VALUES,
    Cause,
    Hypothesis,
    Outcome,
    confirmed,
    counterfactual,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.replay import Replay, Replayed

Int = NDArray[np.int64]


# ---- rows that were never computed -----------------------------------------------------------------------------------


def holes(trace: Trace) -> dict[int, Int]:
    """Roots between others of their prompt that a serve trace has no step-0 row of, by prompt."""
    rows, found = trace.rows, {}
    for prompt in np.unique(rows.prompt_id).tolist():
        roots = np.unique(rows.root[(rows.prompt_id == prompt) & (rows.step == 0)]).astype(np.int64)
        lost = np.setdiff1d(np.arange(roots.min(), roots.max()), roots) if len(roots) else roots
        if len(lost):
            found[prompt] = lost
    return found


def check_holes(context: Context) -> Outcome:
    """Rows in the middle of a prompt or answer that the draft was not run for."""
    found, replay = holes(context.serve), context.replay
    if "selection" in context.serve.manifest.settings:
        return not_tested("of a selection nobody can say which rows were computed", "record the serve side whole")
    if not found:
        prompts = len(np.unique(context.serve.rows.prompt_id))
        return ruled_out(f"no row is missing between the first and the last one of {prompts} prompts")
    count = sum(len(lost) for lost in found.values())
    said = f"the draft was not run for {count} rows between others of {len(found)} prompts"
    if replay is None:
        return not_tested(f"{said}; {context.no_replay}", RECORD_VALUES)
    seen = {number: lost for number, lost in found.items() if number in replay.recorded.keys.prompt_id}
    given = given_by_training(context, seen)
    sites = context.layer_sites("attn.context")
    if not given or not sites:
        return not_tested(f"{said}, which the train side has not either", "record the training side with --replay")
    site = sites[0]
    behind, before, allowed = errors_over_given(context, site, given)
    if not behind:
        return not_tested(f"{said}, and no row behind them could be recomputed", RECORD_VALUES)
    figures = (
        f"{said} ({_places(found)}); {site} of {len(behind)} rows behind them, over training's keys for these: error "
        f"{np.median(behind):.1e} (median), of {len(before)} rows before them {np.median(before or [0.0]):.1e}, "
        f"{allowed:.1e} allowed"
    )
    if np.median(behind) <= allowed or np.median(before or [0.0]) > allowed:
        return ruled_out(figures)
    return confirmed(figures + _longest(context), _fix(context), site)


def _places(found: dict[int, Int]) -> str:
    number, lost = next(iter(found.items()))
    return f"prompt {number}: roots {lost[0]} to {lost[-1]}" + (", and others" if len(found) > 1 else "")


def _longest(context: Context) -> str:
    """Whether another prompt of the trace ended at the server's longest context."""
    longest = context.serve.manifest.settings.get("context_length")
    prompts = context.serve.prompts
    ends = [
        int(number) for number, ids in zip(prompts["prompt_id"], prompts["token_ids"], strict=True)
        if longest and len(ids) + _steps(context) >= int(longest)
    ]  # fmt: skip
    return f"; prompt {ends[0]} came within the draft's length of the longest context, {longest}" if ends else ""


def _steps(context: Context) -> int:
    return int(context.serve.manifest.settings.get("steps") or 0)


def _fix(context: Context) -> str:
    if _longest(context):
        return context.engine.WORDS.run_all_drafts
    return "the server must run its draft over every token, also where it asks for no draft: update it, or report it"


# ---- lengths ---------------------------------------------------------------------------------------------------------


def check_length(context: Context) -> Outcome:
    """More keys seen than there are, or fewer."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        steps = [step for step in replay.recorded.steps if step]
        for words, miscount in (
            ("one empty slot behind its own for each draft step so far", {step: step for step in steps}),
            ("one empty slot behind its own at draft steps", dict.fromkeys(steps, 1)),
            ("one empty slot behind its own", dict.fromkeys([0, *steps], 1)),
            ("none of the draft steps' keys", {step: -step for step in steps}),
            ("all keys but the last one at draft steps", dict.fromkeys(steps, -1)),
            ("all keys but the last one", dict.fromkeys([0, *steps], -1)),
        ):
            view = View(replay.recorded, window=replay.form.window, miscount=miscount)
            yield Hypothesis(words, replay.varied(view=view))

    return counterfactual(
        context,
        context.layer_sites("attn.context"),
        others,
        lambda words: f"the server attends to {words}: its sequence lengths are miscounted; update it, or report it",
    )


CAUSES = (
    Cause(
        "kv-rows-missing",
        "Accept length drops now and then, for all requests of a batch, and stays low for those that go on.",
        "Rows that the draft was not run for, and attention behind them recomputed with the keys that training has "
        "there.",
        "Keep every request away from the longest context, or update the server.",
        ("layer.0.attn.context",),
        check_holes,
        of_server=True,
    ),
    Cause(
        "kv-length",
        "Accept length falls with the depth of the draft.",
        "Attention recomputed with slots behind a row's own that no row was written to, and without the last keys.",
        "Update the server, or report it.",
        ("layer.0.attn.context",),
        check_length,
    ),
)
