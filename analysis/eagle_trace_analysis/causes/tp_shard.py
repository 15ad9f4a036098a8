"""Tensor parallelism: shards that were not summed, or were put together in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed

Real = NDArray[Any]
RANKS = (2, 4, 8)


def _only(shard: int, ranks: int) -> Callable[[Real], Real]:
    def edit(rows: Real) -> Real:
        width = rows.shape[1] // ranks
        out = np.zeros_like(rows)
        out[:, shard * width : (shard + 1) * width] = rows[:, shard * width : (shard + 1) * width]
        return out

    return edit


def _rolled(ranks: int) -> Callable[[Real], Real]:
    return lambda rows: np.roll(rows, rows.shape[1] // ranks, axis=1)


def check(context: Context) -> Outcome:
    """Products over a split dimension: one shard alone, or shards in another order."""
    sites = context.layer_sites("attn.out", "mlp.out")

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        layer = node.site.split(".")[1]
        part = "self_attn.o_proj" if node.site.endswith("attn.out") else "mlp.down_proj"
        name = f"layers.{layer}.{part}.weight"
        if name not in replay.weights:
            return
        width = replay.weights.shape(name)[1]
        for ranks in RANKS:
            if width % ranks:
                continue
            for shard in range(ranks):
                changed = replay.weights.edited(name, _only(shard, ranks))
                words = f"shard {shard} of {ranks} alone (not summed over ranks)"
                yield Hypothesis(words, replay.varied(weights=changed))
            changed = replay.weights.edited(name, _rolled(ranks))
            yield Hypothesis(f"{ranks} shards put together in another order", replay.varied(weights=changed))

    outcome = counterfactual(
        context,
        sites,
        others,
        lambda words: f"the product is {words}: serve with --tp 1 for the draft, or update the engine",
    )
    manifest = context.serve.manifest
    if outcome.verdict == "not_tested" and manifest.settings.get("sglang_args") is not None and manifest.ranks == 1:
        return ruled_out("the server ran the draft on one rank")
    return outcome


CAUSE = Cause(
    "tp-shard",
    "Accept length near 1 with tensor parallelism, fine without.",
    "The output projections recomputed with one shard of 2, 4 or 8 alone, and with shards in another order.",
    "Serve the draft without tensor parallelism, or fix the reduction.",
    ("layer.0.attn.out", "layer.0.mlp.out"),
    check,
)
