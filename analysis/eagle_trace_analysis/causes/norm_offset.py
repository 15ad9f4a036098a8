"""Norms that scale by 1 + w instead of w."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.causes.norm_eps import SITES, norm_sites
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Scaling by 1 + w instead of w, or the other way round."""

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        flag = not replay.form.norm_offset
        yield Hypothesis(f"norms scaled by {'1 + w' if flag else 'w'}", replay.varied(norm_offset=flag))

    return counterfactual(
        context,
        norm_sites(context),
        other,
        lambda _: (
            "serve the draft with the norm it was trained with: store w so that both sides scale by the same numbers"
        ),
    )


CAUSE = Cause(
    "norm-offset",
    "Accept length near 1.",
    "Every norm recomputed with 1 + w in place of w.",
    "Convert the norm weights (add or subtract 1) for the engine's convention.",
    SITES,
    check,
)
