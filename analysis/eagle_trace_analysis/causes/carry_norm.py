"""The hidden state handed to the next draft step, normed on one side only."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Whether the next step is handed the normed stream."""

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        flag = not replay.form.norm_output
        said = context.says("norm_output", flag)
        yield Hypothesis(f"norm_output {str(flag).lower()}", replay.varied(norm_output=flag), said)

    # what the training computes: its own config may mean another thing by the flag
    trained = context.form is not None and context.form.norm_output
    says = f"norm_output {str(trained).lower()}"
    return counterfactual(
        context,
        ["carry"],
        other,
        lambda _: as_trained(
            context, "norm-output", ("norm_output",), says, f"set {says} in the deployed config, as trained"
        ),
        own=("norm_output",),
    )


CAUSE = Cause(
    "carry-norm",
    "Step 0 is fine, later steps are not (3.46 becomes 3.04).",
    "What is handed to the next step held against the stream before and after the final norm.",
    "Set norm_output in the deployed config as trained.",
    ("carry",),
    check,
)
