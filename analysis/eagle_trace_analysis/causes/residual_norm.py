"""The residual stream, started before hidden_norm where it was trained behind it, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Whether the residual stream starts before or after hidden_norm."""

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        flag = not replay.form.norm_before_residual
        name = "hidden_norm(hidden)" if flag else "hidden"
        yield Hypothesis(
            f"residual = {name} + attention (norm_before_residual {str(flag).lower()})",
            replay.varied(norm_before_residual=flag),
            deployed=context.says("norm_before_residual", flag),
        )

    return counterfactual(
        context,
        ["layer.0.attn.residual"],
        other,
        lambda _: context.fix(
            "residual-norm",
            "train and serve with the same norm_before_residual; SGLang 0.5.23 has false only",
        ),
        own=("norm_before_residual",),
    )


CAUSE = Cause(
    "residual-norm",
    "Lower accept length from step 0 on; everything up to attention's output is equal.",
    "The residual stream recomputed as hidden + attention and as hidden_norm(hidden) + attention: the one that "
    "the training config names does not reproduce the server, the other does.",
    "Retrain with --no-norm-before-residual, or serve with an engine that has the trained form.",
    ("layer.0.attn.residual",),
    check,
)
