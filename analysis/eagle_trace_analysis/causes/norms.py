"""Norms: where they stand, what they add to the mean square, how they scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed

NORMS = ("embed_norm", "hidden_norm", "attn.q_a_norm", "attn.kv_a_norm", "mlp.norm")


#: where a norm shows first, of the sites that any family has
SITES = (*(f"layer.0.{name}" for name in NORMS), "norm")


def _norm_sites(context: Context) -> list[str]:
    return [*context.layer_sites(*NORMS), "norm"]


def check_residual(context: Context) -> Outcome:
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


def check_features_norm(context: Context) -> Outcome:
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


def check_carry(context: Context) -> Outcome:
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


def check_head(context: Context) -> Outcome:
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


def check_eps(context: Context) -> Outcome:
    """Another rms_norm_eps: the deployed config's, or the one the recorded rows show."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        served = context.served_form.eps if context.served_form else None
        if served is not None and served != replay.form.eps:
            yield Hypothesis(f"the deployed rms_norm_eps {served:g}", replay.varied(eps=served), deployed=True)
        fitted = fit_eps(replay, node.site, node.step)
        if fitted is not None:
            yield Hypothesis(f"rms_norm_eps {fitted:.3g} (fitted)", replay.varied(eps=fitted))

    return counterfactual(context, _norm_sites(context), others, lambda _: _eps_fix(context), own=("eps",))


def _eps_fix(context: Context) -> str:
    what = f"rms_norm_eps {context.form.eps:g}" if context.form else "rms_norm_eps"
    return as_trained(context, "norm-eps", ("eps",), what, f"set {what}, as trained")


def fit_eps(replay: Replay, site: str, step: int) -> float | None:
    """The eps that the rows of a norm show: y = x w / sqrt(m + eps), so eps = m ((y0 / y)^2 - 1) + eps0 (y0 / y)^2
    with y0 the same under eps0; least squares over the element gives y0 / y, the median over rows eps.
    """
    found = replay.recompute(site, step)
    if not isinstance(found, Recomputed):
        return None
    bare = replay.varied(eps=0.0).recompute(site, step)
    if not isinstance(bare, Recomputed):
        return None
    # under eps 0 the output is w x / sqrt(m); under eps e it is smaller by sqrt(m / (m + e))
    with np.errstate(divide="ignore", invalid="ignore"):
        shrink = np.einsum("tc,tc->t", found.recorded, bare.expected) / np.einsum(
            "tc,tc->t", bare.expected, bare.expected
        )
        known = np.einsum("tc,tc->t", found.expected, bare.expected) / np.einsum(
            "tc,tc->t", bare.expected, bare.expected
        )
        # known = sqrt(m / (m + eps0)) gives m; shrink then gives eps
        mean = replay.form.eps * known**2 / (1 - known**2)
        eps = mean * (1 / shrink**2 - 1)
    eps = eps[np.isfinite(eps)]
    # rows whose own mean square is small show eps best
    return float(np.median(eps)) if len(eps) and np.median(eps) > 0 else None


def check_offset(context: Context) -> Outcome:
    """Scaling by 1 + w instead of w, or the other way round."""

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        flag = not replay.form.norm_offset
        yield Hypothesis(f"norms scaled by {'1 + w' if flag else 'w'}", replay.varied(norm_offset=flag))

    return counterfactual(
        context,
        _norm_sites(context),
        other,
        lambda _: (
            "serve the draft with the norm it was trained with: store w so that both sides scale by the same numbers"
        ),
    )


CAUSES = (
    Cause(
        "residual-norm",
        "Lower accept length from step 0 on; everything up to attention's output is equal.",
        "The residual stream recomputed as hidden + attention and as hidden_norm(hidden) + attention: the one that "
        "the training config names does not reproduce the server, the other does.",
        "Retrain with --no-norm-before-residual, or serve with an engine that has the trained form.",
        ("layer.0.attn.residual",),
        check_residual,
    ),
    Cause(
        "fc-norm-ignored",
        "Low accept length; target features are equal, what enters fc is not.",
        "fc's input recomputed without a norm, with one over all features (norm_before_fc) and with one a feature "
        "(fc_norm), with trained weights and with weights of 1.",
        "Set norm_before_fc and fc_norm in the deployed config as trained, and ship their weights.",
        ("fc.in",),
        check_features_norm,
    ),
    Cause(
        "carry-norm",
        "Step 0 is fine, later steps are not (3.46 becomes 3.04).",
        "What is handed to the next step held against the stream before and after the final norm.",
        "Set norm_output in the deployed config as trained.",
        ("carry",),
        check_carry,
    ),
    Cause(
        "head-norm",
        "Low accept length; the stream behind the layer is equal, what the head reads is not.",
        "The head's input recomputed as the stream behind the final norm and as the stream itself.",
        "Train the draft with the final norm before its head, as every server computes it.",
        ("norm",),
        check_head,
    ),
    Cause(
        "norm-eps",
        "Slightly lower accept length.",
        "Every norm recomputed with the deployed eps, and with the eps that the recorded rows show.",
        "Set rms_norm_eps in the deployed config as trained.",
        SITES,
        check_eps,
    ),
    Cause(
        "norm-offset",
        "Accept length near 1.",
        "Every norm recomputed with 1 + w in place of w.",
        "Convert the norm weights (add or subtract 1) for the engine's convention.",
        SITES,
        check_offset,
    ),
)
