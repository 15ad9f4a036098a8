"""What norms add to the mean square."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed

NORMS = ("embed_norm", "hidden_norm", "attn.q_a_norm", "attn.kv_a_norm", "mlp.norm")
#: where a norm shows first, of the sites that any family has
SITES = (*(f"layer.0.{name}" for name in NORMS), "norm")


def norm_sites(context: Context) -> list[str]:
    return [*context.layer_sites(*NORMS), "norm"]


def check(context: Context) -> Outcome:
    """Another rms_norm_eps: the deployed config's, or the one the recorded rows show."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        served = context.served_form.eps if context.served_form else None
        if served is not None and served != replay.form.eps:
            yield Hypothesis(f"the deployed rms_norm_eps {served:g}", replay.varied(eps=served), deployed=True)
        fitted = fit_eps(replay, node.site, node.step)
        if fitted is not None:
            yield Hypothesis(f"rms_norm_eps {fitted:.3g} (fitted)", replay.varied(eps=fitted))

    return counterfactual(context, norm_sites(context), others, lambda _: _eps_fix(context), own=("eps",))


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


CAUSE = Cause(
    "norm-eps",
    "Slightly lower accept length.",
    "Every norm recomputed with the deployed eps, and with the eps that the recorded rows show.",
    "Set rms_norm_eps in the deployed config as trained.",
    SITES,
    check,
)
