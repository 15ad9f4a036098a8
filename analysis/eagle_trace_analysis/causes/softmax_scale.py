"""Another factor on attention's scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed

#: factors on the scores that are tried: powers of 2 up to this one, so many
MOST_SCALE, SCALES, SCALE_ROWS = 3.0, 13, 8
NEWTON_STEPS, NUDGE = 8, 1e-3


def check(context: Context) -> Outcome:
    """Another factor on the scores: the deployed config's, that of no YaRN, or the one that the recorded rows show."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        form = replay.form
        served = context.served_form.on_scores if context.served_form is not None else form.on_scores
        if served != form.on_scores:
            yield Hypothesis(f"the deployed factor {served:.6g}", replay.varied(scale=served), deployed=True)
        width = form.head_dim + (form.latent.nope if form.latent is not None else 0)
        if not math.isclose(form.on_scores, width**-0.5):
            words = f"{width**-0.5:.6g} = 1 / sqrt({width})"
            yield Hypothesis(words, replay.varied(scale=width**-0.5))
        fitted = fit_scale(replay, node)
        if fitted is not None:
            yield Hypothesis(f"{fitted:.6g} (fitted)", replay.varied(scale=fitted))

    def fix(words: str) -> str:
        trained = f"{context.form.on_scores:.6g}" if context.form is not None else "the trained factor"
        what = f"a factor of {trained} on the scores"
        otherwise = (
            f"the server multiplies the scores by {words}, training by {trained}: copy the rope parameters of the "
            "training config (mscale_all_dim, factor), and the widths of the heads"
        )
        return as_trained(context, "rope", ("scale",), what, otherwise)

    return counterfactual(context, context.layer_sites("attn.context"), others, fix, own=("scale",))


def fit_scale(replay: Replay, node: Replayed) -> float | None:
    """The factor on the scores that comes nearest to some recorded rows.

    The nearest of evenly spaced logarithms, and from there Gauss-Newton steps.
    """
    found = replay.recompute(node.site, node.step)
    if not isinstance(found, Recomputed):
        return None
    some = np.unique(np.linspace(0, len(found.rows) - 1, SCALE_ROWS).astype(np.int64))
    rows, target = found.rows[some], found.recorded[some].astype(np.float64)
    start = replay.form.on_scores

    def off(power: float) -> NDArray[Any]:
        scaled = replay.varied(scale=start * 2.0**power, view=replay.view if replay.view_given else None)
        return scaled.channels(node.site, rows, found.channels).astype(np.float64) - target

    power = min(np.linspace(-MOST_SCALE, MOST_SCALE, SCALES).tolist(), key=lambda one: float(np.square(off(one)).sum()))
    for _ in range(NEWTON_STEPS):
        here = off(power)
        slope = (off(power + NUDGE) - here) / NUDGE
        steep = float(np.square(slope).sum())
        if not np.isfinite(steep) or steep == 0:
            return None
        power = float(np.clip(power - float((slope * here).sum()) / steep, -MOST_SCALE, MOST_SCALE))
    return float(start * 2.0**power)


CAUSE = Cause(
    "softmax-scale",
    "Accept length falls, often only a little; queries and keys are equal, what attention makes of them is not.",
    "Attention recomputed with the deployed config's factor on the scores, with 1 / sqrt(width of a query), and "
    "with the factor that comes nearest.",
    "Copy the rope parameters of the training config (YaRN's mscale_all_dim and factor scale the scores of latent "
    "attention).",
    ("layer.0.attn.context",),
    check,
)
