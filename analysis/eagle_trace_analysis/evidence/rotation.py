"""The recorded rotation: queries before and after it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.replay.replay import Replay

Real = NDArray[Any]


def turned_queries(replay: Replay) -> tuple[Real, Real, NDArray[np.bool_]] | None:
    """What is rotated of the first layer's queries, before and after [S, heads, size], and the rows that have both."""
    before, after = (replay.recorded.values(f"layer.0.attn.{name}") for name in ("q", "q_rope"))
    size, latent = replay.form.head_dim, replay.form.latent
    width = size + (latent.nope if latent is not None else 0)
    if before is None or after is None or before.values.shape[1] % width or after.values.shape[1] % size:
        return None
    x, y = before.values.reshape(len(before.values), -1, width), after.values.reshape(len(after.values), -1, size)
    # of latent attention the last part of each head is rotated
    return (x[..., width - size :], y, before.present & after.present) if x.shape[1] == y.shape[1] else None
