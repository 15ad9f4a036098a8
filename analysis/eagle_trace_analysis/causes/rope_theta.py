"""Other frequencies of the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, as_trained, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.rotation import turned_queries
from eagle_trace_analysis.replay.replay import Replay, Replayed

Real = NDArray[Any]
#: powers of ten that are tried as a base of scaled frequencies, and how many
THETAS = (2.0, 8.0, 61)


def check(context: Context) -> Outcome:
    """Other frequencies: the deployed config's, or those that the recorded rotation shows."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        mine = replay.form.rope
        served = context.served_form.rope if context.served_form else None
        if served is not None:
            # the share of the head, and how tables are rounded, are other causes'
            served = replace(served, partial=mine.partial, interleaved=mine.interleaved, rounded=mine.rounded)
            if served != mine:
                words = replace(served, partial=1.0).words()
                yield Hypothesis(f"the deployed {words}", replay.varied(rope=served), deployed=True)
        fitted = fit_theta(replay, node.step)
        if fitted is not None:
            words = f"theta {fitted:.6g} (fitted to the recorded rotation)"
            plain = replace(mine, theta=fitted, kind="default", parameters={})
            yield Hypothesis(words if mine.kind == "default" else f"{words}, no scaling", replay.varied(rope=plain))
        scaled = fit_scaled_theta(replay, node.step)
        if scaled is not None:
            words = f"theta {scaled:.6g} (fitted to the recorded rotation)"
            yield Hypothesis(words, replay.varied(rope=replace(mine, theta=scaled)))

    return counterfactual(
        context,
        context.layer_sites("attn.q_rope", "attn.k_rope"),
        others,
        lambda _: _fix(context),
        own=("rope frequencies",),
    )


def _fix(context: Context) -> str:
    words = context.form.rope.words() if context.form else "rope_parameters"
    return as_trained(context, "rope", ("rope",), words, f"set rope_parameters as trained ({words})")


def fit_theta(replay: Replay, step: int = 0) -> float | None:
    """The base of the frequencies that turned recorded q into recorded q_rope at a step, None if no rows show it.

    Of a rotation without scaling, whose pair i turns by theta^(-2 i / size) per position.
    """
    frequency = _frequencies(replay, step)
    if frequency is None:
        return None
    size = int(replay.form.head_dim * replay.form.rope.partial)
    index = np.arange(1, len(frequency))
    good = frequency[1:] > 1e-9
    if not good.any():
        return None
    # small angles drown in rounding; the first pairs tell theta best
    theta = np.exp(-np.log(frequency[1:][good]) * size / (2 * index[good]))
    return float(np.median(theta[: max(1, size // 8)]))


def fit_scaled_theta(replay: Replay, step: int = 0) -> float | None:
    """The base with which the trained scaling comes nearest to the recorded rotation; None if there is no scaling."""
    frequency, rope = _frequencies(replay, step), replay.form.rope
    if frequency is None or rope.kind == "default":
        return None
    some = np.arange(1, max(3, len(frequency) // 4 + 1))
    some = some[(some < len(frequency)) & (frequency[np.minimum(some, len(frequency) - 1)] > 1e-9)]
    if not some.size:
        return None

    def off(power: float) -> float:
        found = replace(rope, theta=10.0**power).frequencies(replay.form.head_dim)
        return float("inf") if found is None else float(np.square(np.log(found[0][some] / frequency[some])).sum())

    powers = np.linspace(*THETAS)
    best = min(powers.tolist(), key=off)
    low, high = best - (powers[1] - powers[0]), best + (powers[1] - powers[0])
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if off(left) < off(right) else (left, high)
    return float(10.0 ** ((low + high) / 2))


def _frequencies(replay: Replay, step: int) -> Real | None:
    """Angles per position that turned recorded q into recorded q_rope at a step [rotated / 2]; None if no rows show it.

    Between positions that are 1 to 3 apart no pair goes round once, so the angle of a pair from one to the other is
    their distance times its frequency. At position 0 every angle is 0.
    """
    size = int(replay.form.head_dim * replay.form.rope.partial)
    half = size // 2
    found = turned_queries(replay)
    if found is None or half < 2:
        return None
    before, after, there = found
    rows = np.flatnonzero(there & (replay.recorded.keys.step == step))
    position, first = np.unique(replay.recorded.keys.position[rows], return_index=True)
    if not len(position):
        return None
    neighbours = replay.form.rope.interleaved
    one, other = (slice(0, size, 2), slice(1, size, 2)) if neighbours else (slice(0, half), slice(half, size))
    x, y = before[rows[first]], after[rows[first]]
    a, b, c, d = x[..., one], x[..., other], y[..., one], y[..., other]
    turned = (a * c + b * d).sum(axis=1) + 1j * (a * d - b * c).sum(axis=1)
    if position[0] > 0:
        position, turned = np.insert(position, 0, 0), np.insert(turned, 0, 1.0, axis=0)
    apart = np.diff(position)
    near = apart <= 3
    if not near.any():
        return None
    angle = np.angle(turned[1:][near] * np.conj(turned[:-1][near]))
    frequency: Real = np.median(angle / apart[near, None], axis=0)
    return frequency


CAUSE = Cause(
    "rope-theta",
    "Slightly to very low accept length; queries are equal before the rotation.",
    "The rotation recomputed with the deployed theta or scaling, and with the theta that q and q_rope show.",
    "Copy the rope parameters of the training config into the deployed one.",
    ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
    check,
)
