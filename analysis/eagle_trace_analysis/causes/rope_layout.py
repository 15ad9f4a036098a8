"""Neighbours rotated instead of halves, or another share of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.rotation import turned_queries
from eagle_trace_analysis.replay.replay import Replay, Replayed

#: shares of a head that are rotated in published models
SHARES = (1.0, 0.5, 0.25, 0.75)


def check(context: Context) -> Outcome:
    """Neighbours rotated instead of halves, or another share of the head."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        rope = replay.form.rope
        served = context.served_form.rope.partial if context.served_form else rope.partial
        if served != rope.partial:
            changed = replay.varied(rope=replace(rope, partial=served))
            yield Hypothesis(f"the deployed {served:g} of each head rotated", changed, deployed=True)
        flipped = replace(rope, interleaved=not rope.interleaved)
        words = "neighbouring elements rotated" if flipped.interleaved else "halves rotated"
        says = context.served_form is not None and context.served_form.rope.interleaved == flipped.interleaved
        yield Hypothesis(words, replay.varied(rope=flipped), deployed=says)
        for share in dict.fromkeys((*SHARES, fit_share(replay))):
            if share is not None and share not in (rope.partial, served):
                yield Hypothesis(f"{share:g} of each head rotated", replay.varied(rope=replace(rope, partial=share)))

    return counterfactual(
        context,
        context.layer_sites("attn.q_rope", "attn.k_rope"),
        others,
        lambda words: _layout_fix(context, words),
        own=("rope layout",),
    )


def _layout_fix(context: Context, words: str) -> str:
    if "of each head" in words:
        return as_trained(
            context,
            "rope",
            ("rope",),
            f"{_share(context)} of each head rotated",
            f"rotate {_share(context)} of each head, as trained (partial_rotary_factor)",
        )
    trained, served = context.form, context.served_form
    if trained is not None and served is not None and trained.rope.interleaved != served.rope.interleaved:
        return f"set rope_interleave {str(trained.rope.interleaved).lower()} in the deployed config, as trained"
    return f"the server has {words}: serve with the layout of the training, or permute q and k weights for it"


def fit_share(replay: Replay) -> float | None:
    """The share of a head that recorded q_rope turned: its last elements are those of q; None if no row shows it."""
    found = turned_queries(replay)
    rows = np.flatnonzero(found[2] & (replay.recorded.keys.position >= 1)) if found is not None else np.empty(0, int)
    if found is None or not rows.size:
        return None
    before, after, _ = found
    size = replay.form.head_dim
    off = np.abs(after[rows] - before[rows]).reshape(-1, size).max(axis=0)
    scale = np.abs(before[rows]).max()
    turned = np.flatnonzero(off > 1e-3 * scale)
    return float(turned[-1] + 1) / size if len(turned) else None


def _share(context: Context) -> str:
    return f"{context.form.rope.partial:g}" if context.form else "the same share"


CAUSE = Cause(
    "rope-layout",
    "Accept length near 1; queries are equal before the rotation.",
    "The rotation recomputed on neighbouring elements instead of halves, and on other shares of each head.",
    "Serve with the layout of the training, or permute the rows of q and k for it.",
    ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
    check,
)
