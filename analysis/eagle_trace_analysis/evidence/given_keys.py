"""Keys and values of roots that the server has no rows of, lent by the training."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View, cached_sites
from eagle_trace_analysis.replay.replay import Recomputed

#: keys and values of some roots of a prompt, and the roots, in order
Given = tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]


def errors_over_given(context: Context, site: str, given: dict[int, Given]) -> tuple[list[float], list[float], float]:
    """Attention recomputed with keys that training has for roots which the server has not.

    Args:
        context: the pair, with a replay.
        site: attention's output of a layer.
        given: training's keys and values, and the roots they are of, by serve prompt (`given_by_training`).

    Returns:
        Relative errors of rows that see such a root, those of all others, and what is allowed.
    """
    replay, control = context.replay, context.control
    assert replay is not None
    whole = replay.varied(view=View(replay.recorded, window=replay.form.window, missing=given))
    allowed = 4 * max(replay.allowed(site)["rho_max"], control.allowed(site)["rho_max"] if control else 0.0)
    seeing: list[float] = []
    others: list[float] = []
    for step in replay.recorded.steps:
        found = whole.recompute(site, step)
        if not isinstance(found, Recomputed):
            continue
        keys = replay.recorded.keys.take(found.rows)
        for prompt, root, error in zip(
            keys.prompt_id.tolist(), keys.root.tolist(), found.row_errors.tolist(), strict=True
        ):
            (seeing if prompt in given and root > given[prompt][2].min() else others).append(error)
    return seeing, others, allowed


def given_by_training(context: Context, missing: dict[int, Any]) -> dict[int, Given]:
    """Training's keys and values of roots that the server has no rows of, by serve prompt; of those it has alone."""
    control = context.control
    if control is None:
        return {}
    numbers = dict(zip(context.train.prompts["prompt_key"], context.train.prompts["prompt_id"], strict=True))
    keys = dict(zip(context.serve.prompts["prompt_id"], context.serve.prompts["prompt_key"], strict=True))
    found = {}
    for prompt, roots in missing.items():
        if (train_prompt := numbers.get(keys.get(prompt))) is None:
            continue
        template = context.train.rows
        at = np.flatnonzero((template.prompt_id == train_prompt) & (template.step == 0) & np.isin(template.root, roots))
        at = at[np.unique(template.root[at], return_index=True)[1]]
        wanted = template.take(at)
        k, v = (control.recorded.at(name, wanted) for name in cached_sites(control.recorded, "layer.0"))
        if len(at) == len(roots) and k is not None and v is not None and k.present.all() and v.present.all():
            found[prompt] = k.values, v.values, roots
    return found
