"""Cache lengths that are miscounted: slots too many, or too few."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
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


CAUSE = Cause(
    "kv-length",
    "Accept length falls with the depth of the draft.",
    "Attention recomputed with slots behind a row's own that no row was written to, and without the last keys.",
    "Update the server, or report it.",
    ("layer.0.attn.context",),
    check,
)
