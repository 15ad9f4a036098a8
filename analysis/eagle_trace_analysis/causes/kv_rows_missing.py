"""Rows in the middle of a prompt or an answer that the server never ran its draft for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.given_keys import errors_over_given, given_by_training

Int = NDArray[np.int64]


def holes(trace: Trace) -> dict[int, Int]:
    """Roots between others of their prompt that a serve trace has no step-0 row of, by prompt."""
    rows, found = trace.rows, {}
    for prompt in np.unique(rows.prompt_id).tolist():
        roots = np.unique(rows.root[(rows.prompt_id == prompt) & (rows.step == 0)]).astype(np.int64)
        lost = np.setdiff1d(np.arange(roots.min(), roots.max()), roots) if len(roots) else roots
        if len(lost):
            found[prompt] = lost
    return found


def check(context: Context) -> Outcome:
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


CAUSE = Cause(
    "kv-rows-missing",
    "Accept length drops now and then, for all requests of a batch, and stays low for those that go on.",
    "Rows that the draft was not run for, and attention behind them recomputed with the keys that training has there.",
    "Keep every request away from the longest context, or update the server.",
    ("layer.0.attn.context",),
    check,
    of_server=True,
)
