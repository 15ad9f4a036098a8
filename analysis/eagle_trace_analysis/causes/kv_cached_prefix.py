"""Keys of a cached prefix that are not what this draft computes for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.given_keys import errors_over_given, given_by_training


def check(context: Context) -> Outcome:
    """Keys of a cached prefix that are not what this draft computes for it."""
    replay = context.replay
    if replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    sites = context.layer_sites("attn.context")
    missing = _missing_roots(context)
    if not missing:
        prompts = len(np.unique(replay.recorded.keys.prompt_id))
        return ruled_out(f"no cached prefix: the server computed every row of {prompts} prompts itself")
    if not sites:
        return not_tested("attention was not recorded", RECORD_VALUES)
    given = given_by_training(context, missing)
    if len(given) < len(missing):
        return not_tested(
            f"{len(missing)} prompts start from a cached prefix, of which the training side has {len(given)} only",
            "record the training side with --replay on the same prompts",
        )
    site = sites[0]
    warm, cold, allowed = errors_over_given(context, site, given)
    if not warm:
        return not_tested("no row behind a cached prefix could be recomputed", RECORD_VALUES)
    figures = (
        f"{site} over training's keys for the cached prefix of {len(given)} prompts: error {np.median(warm):.1e} "
        f"(median of {len(warm)}), of other prompts {np.median(cold) if cold else 0.0:.1e} ({len(cold)} rows), "
        f"{allowed:.1e} allowed"
    )
    own_prefix = all(context.agrees(name) for name in context.feature_sites)
    if np.median(warm) > allowed >= (np.median(cold) if cold else 0.0) and own_prefix:
        off = context.engine.WORDS.no_prefix_cache
        return confirmed(figures, f"serve with {off}, or flush the cache when the draft or its settings change", site)
    return ruled_out(figures)


def _missing_roots(context: Context) -> dict[int, Any]:
    """Roots before each prompt's first recorded step-0 row, by serve prompt."""
    replay = context.replay
    if replay is None:
        return {}
    rows, found = context.serve.rows, {}
    for prompt in np.unique(replay.recorded.keys.prompt_id):
        roots = rows.root[(rows.prompt_id == prompt) & (rows.step == 0)]
        if len(roots) and roots.min() > 0:
            found[int(prompt)] = np.arange(int(roots.min()))
    return found


CAUSE = Cause(
    "kv-cached-prefix",
    "Decays over time; a cold start is fine.",
    "Attention of prompts that start from a cached prefix recomputed with the keys that training has for it.",
    "Serve without a prefix cache, or flush the cache when the draft changes.",
    ("layer.0.attn.context",),
    check,
    of_server=True,
)
