"""The trained target layers, side by side in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context

Real = NDArray[Any]


def check(context: Context) -> Outcome:
    """The same layers side by side in another order."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.single or len(features.served) != len(features.sites):
        return ruled_out("the server fed another number of layers: there is no order to compare")
    matrix, count = features.matrix, len(features.sites)
    order = matrix.argmin(axis=1).tolist()
    best = [float(matrix[j, k]) for j, k in enumerate(order)]
    allowed = [features.allowed[site] for site in features.sites]
    if order == list(range(count)):
        return ruled_out(
            f"each of {count} layers is nearest to itself (channel error {max(best):.1e} at most; another layer "
            f"{_second(matrix):.1e} at least)"
        )
    if sorted(order) == list(range(count)) and all(one <= allowed[k] for one, k in zip(best, order, strict=True)):
        evidence = f"the server's layers 0 to {count - 1} are training's {order}, channel error {max(best):.1e} at most"
        fix = f"feed the layers in the order of the training: {context.trained_ids or 'as trained'}"
        found = context.failed("layer-ids")
        return confirmed(evidence, found.fix if found else fix, f"target.hidden.{_first_moved(order)}")
    return ruled_out(
        f"the server's layers are no rearrangement of the trained ones (nearest: {order}, {max(best):.1e})"
    )


def _first_moved(order: list[int]) -> int:
    return next(j for j, k in enumerate(order) if j != k)


def _second(matrix: Real) -> float:
    off = matrix + np.where(np.eye(len(matrix), dtype=np.bool_), np.inf, 0.0)
    return float(off.min()) if len(matrix) > 1 else float("inf")


CAUSE = Cause(
    "features-permuted",
    "Low accept length.",
    "Every layer the server fed against every layer of the training, channel by channel: each is one of them, at "
    "another place.",
    "Feed the layers in the order of the training.",
    ("fused", "target.hidden.0"),
    check,
)
