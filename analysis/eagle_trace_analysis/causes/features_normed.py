"""Features taken after the target's final norm, on one side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.checkpoint.files import as_float32
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import CLEARLY, Features, channel_error
from eagle_trace_analysis.evidence.layers import layer_words, target_layers
from eagle_trace_analysis.replay.inputs import rms

Real = NDArray[Any]


def check(context: Context) -> Outcome:
    """Features after the target's final norm, on one side."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.healthy:
        return ruled_out(f"all {len(features.sites)} layers agree (channel error {_diagonal(features):.1e} at most)")
    layers = target_layers(context)
    for j, rows in enumerate(features.served):
        near = features.nearest(rows)
        if near is None or layers is None or near[0] != layers + 1 or near[1] > CLEARLY * near[2].get(layers, 1.0):
            continue
        if context.trained_ids and j < len(context.trained_ids) and context.trained_ids[j] == layers + 1:
            continue
        if features.single:
            return ruled_out(
                f"the one layer fed is nearest to {layer_words(near[0], layers)} ({near[1]:.1e}), as every engine "
                "feeds its last hidden state; the fault is that it is one"
            )
        evidence = f"layer {j} of the server is nearest to {layer_words(near[0], layers)} (channel error {near[1]:.1e})"
        return confirmed(evidence, "capture the layers' outputs before the final norm", f"target.hidden.{j}")
    if features.single:
        return ruled_out("the server fed one layer only: see single-layer-features")
    return _normed_pairs(context, features)


def _normed_pairs(context: Context, features: Features) -> Outcome:
    weight, eps = _final_norm(context)
    best = (float("inf"), "")
    for j, x in enumerate(features.served):
        for k, y in enumerate(features.trained):
            if x.shape != y.shape:
                continue
            # the direction alone, if the norm's weight is not known
            for scale in (weight, None):
                if scale is not None and len(scale) != x.shape[1]:
                    continue
                for after, before, side in ((x, y, "server"), (y, x, "training")):
                    expected = rms(before, eps) * (1.0 if scale is None else scale)
                    error = channel_error(after, expected)
                    if error < best[0]:
                        best = (
                            error,
                            f"layer {j if side == 'server' else k} of the {side} is the final norm of the other side's",
                        )
                    if error <= features.allowed[features.sites[k]]:
                        evidence = f"{best[1]} layer {k if side == 'server' else j} (channel error {error:.1e})"
                        fix = "take the features before the final norm on both sides"
                        return confirmed(evidence, fix, f"target.hidden.{j}")
    return ruled_out(f"no layer of a side is the normed one of the other (nearest: channel error {best[0]:.1e})")


def _final_norm(context: Context) -> tuple[Real | None, float]:
    target = context.target
    if target is None:
        return None, 1e-6
    eps = float(target.config.get("rms_norm_eps") or 1e-6)
    tensors = target.checkpoint.tensors.values() if target.checkpoint else ()
    found = [
        one
        for one in tensors
        if one.name.endswith("norm.weight") and ".layers." not in one.name and len(one.shape) == 1
    ]
    return (as_float32(found[0].read()) if len(found) == 1 else None), eps


def _diagonal(features: Features) -> float:
    return float(np.diag(features.matrix).max())


CAUSE = Cause(
    "features-normed",
    "Low accept length.",
    "The nearest of all target layers is the one after the final norm; or one side's features are the final "
    "norm of the other's.",
    "Capture hidden states before the final norm.",
    ("target.hidden.0",),
    check,
)
