"""Norms between the target's features and fc, on one side only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Norms between the target features and fc."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        form, weights = replay.form, replay.weights
        # a norm that training did not have has its weights in the deployed checkpoint alone
        for name, tensor in (context.serve_draft.tensors if context.serve_draft else {}).items():
            known = context.engine.canonical_name(name)
            if known.startswith(("input_norm.", "fc_norm.")) and known not in weights:
                weights = weights.borrowing(known, tensor)
        width = replay.recorded.width("fused") or 0
        ones = {"input_norm.weight": np.ones(width)}
        ones |= {f"fc_norm.{k}.weight": np.ones(form.target_width) for k in range(width // max(1, form.target_width))}
        for whole, each in ((False, False), (True, False), (False, True)):
            words = "no norm" if not (whole or each) else "norm_before_fc" if whole else "fc_norm"
            if (whole, each) != (form.norm_before_fc, form.fc_norm):
                changed = replay.varied(weights=weights, norm_before_fc=whole, fc_norm=each)
                said = context.says("norm_before_fc", whole) and context.says("fc_norm", each)
                yield Hypothesis(f"{words} before fc", changed, said)
            if whole or each:
                changed = replay.varied(weights=weights.replaced(ones), norm_before_fc=whole, fc_norm=each)
                yield Hypothesis(f"{words} before fc with weights of 1", changed)

    return counterfactual(
        context,
        ["fc.in"],
        others,
        lambda _: as_trained(
            context,
            "fc-norm",
            ("norm_before_fc", "fc_norm"),
            "norm_before_fc and fc_norm",
            "set norm_before_fc and fc_norm as trained",
        ),
        own=("norm_before_fc", "fc_norm"),
    )


CAUSE = Cause(
    "fc-norm-ignored",
    "Low accept length; target features are equal, what enters fc is not.",
    "fc's input recomputed without a norm, with one over all features (norm_before_fc) and with one a feature "
    "(fc_norm), with trained weights and with weights of 1.",
    "Set norm_before_fc and fc_norm in the deployed config as trained, and ship their weights.",
    ("fc.in",),
    check,
)
