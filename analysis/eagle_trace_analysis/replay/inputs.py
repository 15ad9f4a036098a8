"""What a step of the draft forward is recomputed from, and the arithmetic that families share.

Shapes: T rows, C channels of the output (all, or a sample of them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.form import Form, Rope
from eagle_trace_analysis.replay.recorded import Recorded
from eagle_trace_analysis.replay.weights import Weights

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]
Real = NDArray[Any]


class NotReplayedError(Exception):
    """A step cannot be recomputed; the message says what is not there."""


@dataclass
class Inputs:
    """What a step is computed from, on the rows `at` of the sample.

    Attributes:
        recorded: the sample.
        at: rows of the sample, int64 [T].
        channels: outputs to compute, int64 [C].
        form, weights, view: what the step is said to be.
        present: rows whose inputs are all there, bool [T]; steps narrow it down.
    """

    recorded: Recorded
    at: Int
    channels: Int
    form: Form
    weights: Weights
    view: View
    present: Bool = field(init=False)

    def __post_init__(self) -> None:
        self.present = np.ones(len(self.at), dtype=np.bool_)

    def site(self, name: str, rows: Int | None = None) -> Real:
        """Recorded rows of a site [T, W]; those that are not there are zero and no longer `present`."""
        found = self.recorded.values(name)
        if found is None:
            raise NotReplayedError(f"{name} was not recorded")
        rows = self.at if rows is None else rows
        self.present &= (rows >= 0) & found.present[np.maximum(rows, 0)]
        out: Real = found.values[rows].astype(self.recorded.dtype)
        return out

    def weight(self, name: str) -> Real:
        """A vector or table, whole."""
        self._need(name)
        return self.weights.whole(name).astype(self.recorded.dtype)

    def product(self, x_TW: Real, name: str) -> Real:
        """x times the sampled rows of a matrix [out, W], [T, C]."""
        self._need(name)
        shape = self.weights.shape(name)
        if len(shape) != 2 or shape[1] != x_TW.shape[1] or shape[0] <= self.channels[-1]:
            raise NotReplayedError(f"{name} is {list(shape)}, which does not take rows of {x_TW.shape[1]}")
        out: Real = x_TW @ self.weights.rows(name, self.channels).astype(self.recorded.dtype).T
        return out

    def _need(self, name: str) -> None:
        if name not in self.weights:
            raise NotReplayedError(f"the checkpoint has no {name}")

    def norm(self, x_TW: Real, name: str) -> Real:
        """x / sqrt(mean(x^2) + eps) * w (RMSNorm), with 1 + w if the form has it so."""
        weight = self.weight(name)
        if len(weight) != x_TW.shape[-1]:
            raise NotReplayedError(f"{name} has {len(weight)} elements for rows of {x_TW.shape[-1]}")
        out: Real = rms(x_TW, self.form.eps) * (weight + 1 if self.form.norm_offset else weight)
        return out


def rms(x_TW: Real, eps: float) -> Real:
    """x / sqrt(mean(x^2) + eps), row by row."""
    out: Real = x_TW / np.sqrt((x_TW * x_TW).mean(axis=-1, keepdims=True) + eps)
    return out


def rotate(x_TA: Real, positions: NDArray[np.integer], head_dim: int, rope: Rope) -> Real:
    """Heads of x turned by their position [T]."""
    found = rope.angles(positions, head_dim)
    if found is None:
        raise NotReplayedError(f"rope type {rope.kind!r} is not known here")
    angle, factor = found
    cos, sin = ((f(angle) * factor).astype(x_TA.dtype)[:, None, :] for f in (np.cos, np.sin))
    half = angle.shape[1]
    if x_TA.shape[1] % head_dim:
        raise NotReplayedError(f"rows of {x_TA.shape[1]} hold no whole heads of {head_dim}")
    x = x_TA.reshape(len(x_TA), -1, head_dim)
    out = x.copy()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (
        slice(0, half), slice(half, 2 * half))  # fmt: skip
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out.reshape(x_TA.shape)


def silu(x: Real) -> Real:
    """x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        out: Real = x / (1 + np.exp(-x))
    return out
