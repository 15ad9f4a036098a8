"""The head, reading the stream before the final norm instead of behind it."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Whether the head reads the normed stream."""

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        flag = not replay.form.head_norm
        words = "the final norm before the head" if flag else "no norm before the head"
        yield Hypothesis(words, replay.varied(head_norm=flag), context.says("head_norm", flag))

    def fix(_: str) -> str:
        if context.form is not None and not context.form.head_norm:
            return (
                "the draft was trained without the final norm before its head (SpecForge 0.2.0: norm_output false), "
                "which no server leaves out: take norm_output out of the draft's config and train again"
            )
        return "the server leaves out the final norm before the head: update or report it"

    return counterfactual(context, ["norm"], other, fix, own=("head_norm",))


CAUSE = Cause(
    "head-norm",
    "Low accept length; the stream behind the layer is equal, what the head reads is not.",
    "The head's input recomputed as the stream behind the final norm and as the stream itself.",
    "Train the draft with the final norm before its head, as every server computes it.",
    ("norm",),
    check,
)
