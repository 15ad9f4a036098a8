"""Queries, keys and values in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import (
    RECORD_VALUES,
    Cause,
    Outcome,
    confirmed,
    innocent,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.context import Context
from eagle_trace_analysis.replay import Recomputed
from eagle_trace_analysis.weights import CHANNELS

Real = NDArray[Any]
ROWS = 64
PARTS = ("q", "k", "v")


def check_order(context: Context) -> Outcome:
    """Whether the server's channels are the trained ones at other places."""
    sites = context.layer_sites(*(f"attn.{part}" for part in PARTS))
    judged = [one for one in context.nodes(sites) if one.serve is not None]
    if context.replay is None or not judged:
        return not_tested(
            context.no_replay if context.replay is None else "no queries could be recomputed", RECORD_VALUES
        )
    faulty = [one for one in judged if one.verdict == "faulty" and not context.agrees(one.site, one.step)]
    if not faulty:
        return ruled_out(innocent(judged))
    layer, step = faulty[0].site.rsplit(".attn", 1)[0], faulty[0].step
    found = [context.replay.recompute(f"{layer}.attn.{part}", step) for part in PARTS]
    parts = [one for one in found if isinstance(one, Recomputed)]
    if len(parts) < len(PARTS) or any(one.expected.shape[1] >= CHANNELS for one in parts[1:]):
        return not_tested(
            f"{faulty[0].site} differs, but only a sample of its channels was recomputed", "compare the weights"
        )
    expected, recorded = (
        np.concatenate([getattr(one, name)[:ROWS] for one in parts], axis=1) for name in ("expected", "recorded")
    )
    place, error = match_channels(recorded, expected)
    allowed = 4 * max(context.replay.allowed(site)["channel_median"] for site in sites)
    moved = int((place != np.arange(len(place))).sum())
    if not moved:
        return ruled_out(f"all {len(place)} channels of q, k and v are at their trained places")
    exact = float(np.quantile(error, 0.99, method="higher"))
    if len(np.unique(place)) == len(place) and exact <= 64 * allowed and float(np.median(error)) <= allowed:
        size = context.replay.form.head_dim
        evidence = (
            f"{faulty[0].site}: each of {len(place)} channels of q, k and v is a trained one, {moved} at another "
            f"place (channel error {np.median(error):.1e}, {allowed:.1e} allowed){_heads(place, size)}"
        )
        fix = context.fix("head-shape", "store q, k and v in the engine's order, head by head")
        return confirmed(evidence, fix, faulty[0].site)
    return ruled_out(
        f"{faulty[0].site} differs, and its channels are no rearrangement of the trained ones "
        f"(nearest: {np.median(error):.1e})"
    )


def match_channels(recorded: Real, expected: Real) -> tuple[NDArray[np.int64], Real]:
    """For each recorded channel the expected one it is most like [C], and the relative error of that match [C].

    Args:
        recorded, expected: [T, C] on the same rows; T of a few dozen make a chance match impossible.
    """
    square = (expected**2).sum(axis=0)
    # |x - y|^2 = x^2 - 2 x y + y^2, for all pairs at once; then exactly for the pairs chosen
    distance = square[None, :] - 2 * recorded.T @ expected
    place = distance.argmin(axis=1)
    off = recorded - expected[:, place]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt((off**2).sum(axis=0) / square[place])
    return place.astype(np.int64), np.nan_to_num(error, nan=0.0, posinf=1.0)


def _heads(place: NDArray[np.int64], size: int) -> str:
    blocks = place.reshape(-1, size) if len(place) % size == 0 else place.reshape(1, -1)
    starts = blocks[:, 0]
    if (blocks == starts[:, None] + np.arange(blocks.shape[1])).all() and (starts % size == 0).all():
        order = ", ".join(str(int(one) // size) for one in starts[:12])
        return f"; whole heads, in the order {order}{', ...' if len(starts) > 12 else ''}"
    return "; within heads"


CAUSES = (
    Cause(
        "qkv-order",
        "Accept length near 1.",
        "Each channel of the server's q, k and v matched with the trained channel it is equal to.",
        "Store the projections in the order the engine splits them (q, k, v; head by head).",
        ("layer.0.attn.q", "layer.0.attn.k", "layer.0.attn.v"),
        check_order,
    ),
)
