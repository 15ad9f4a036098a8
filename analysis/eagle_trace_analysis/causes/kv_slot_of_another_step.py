"""Keys of draft steps in each other's cache slots, or in none."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual, not_tested
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Keys of draft steps in each other's slots, or in none."""
    if context.replay is not None and max(context.replay.recorded.steps, default=0) < 1:
        return not_tested("no draft steps were recorded", "record the serve side with more than one draft step")

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        steps = [step for step in replay.recorded.steps if step]
        for slot in steps:
            for holds in (*(step for step in steps if step != slot), None):
                view = View(replay.recorded, window=replay.form.window, slots={slot: holds})
                words = f"the key of draft step {holds} in the slot of step {slot}"
                if holds is None:
                    words = f"the key of draft step {slot} not seen"
                yield Hypothesis(words, replay.varied(view=view))

    return counterfactual(
        context,
        context.layer_sites("attn.context"),
        others,
        lambda words: (
            f"the server attends with {words}: each draft step needs a cache slot of its own, read at its own place; "
            "update it, or report it"
        ),
    )


CAUSE = Cause(
    "kv-slot-of-another-step",
    "Accept length falls with the depth of the draft.",
    "Attention of draft steps recomputed with one step's key in another's slot, and without it.",
    "Give each draft step a cache slot of its own.",
    ("layer.0.attn.context",),
    check,
)
