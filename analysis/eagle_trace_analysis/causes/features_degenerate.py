"""Features that are zero, the same everywhere, equal layer for layer, or rows of another prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, clipped, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import Features, channel_error
from eagle_trace_analysis.evidence.misplaced import misplaced
from eagle_trace_analysis.pairing.keys import lookup

Real = NDArray[Any]


def check(context: Context) -> Outcome:
    """Zeros, one layer several times, one row everywhere, rows of another prompt; on either side."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    found = [
        f"{side}: {fault}"
        for side, layers in (("training", features.trained), ("serving", features.served))
        for fault in _faults(layers)
    ]
    site = "target.hidden.0"
    if not found and not features.healthy and not features.single and (other := _other_prompt(features)) is not None:
        found.append(other)
    if not found and (rows := misplaced(context)) is not None and not rows.shift:
        found.append(f"serving: {rows.words}")
    if found:
        side = "the extractor of the training features" if "training:" in found[0] else "the server's capture"
        return confirmed("; ".join(found[:3]), f"repair {side} and take the features again; then train on them", site)
    norms = [float(np.median(np.linalg.norm(layer, axis=1))) for layer in features.trained]
    words = ", ".join(f"{norm:.3g}" for norm in norms)
    return ruled_out(
        f"{len(features.serve_keys)} rows of {len(features.sites)} layers: none zero, none twice, all vary "
        f"(median norms {words})"
    )


def _faults(layers: list[Real]) -> list[str]:
    faults = []
    for k, rows in enumerate(layers):
        rows = rows[np.isfinite(rows).all(axis=1)]
        if len(rows) < 2:
            continue
        zero = int((~rows.any(axis=1)).sum())
        if zero > 0.1 * len(rows):
            faults.append(f"layer {k} is zero in {zero} of {len(rows)} rows")
        elif (rows == rows[:1]).all():
            faults.append(f"layer {k} is the same in all {len(rows)} rows")
    for k, rows in enumerate(layers):
        for j in range(k):
            if rows.shape == layers[j].shape and rows.any() and np.array_equal(rows, layers[j]):
                faults.append(f"layers {j} and {k} are equal, element for element")
    return faults


def _other_prompt(features: Features) -> str | None:
    """Whether the server's rows are training's rows of another prompt."""
    prompts = np.unique(features.train_keys.prompt_id)
    swapped = []
    for prompt in prompts[:8]:
        here = np.flatnonzero(features.train_keys.prompt_id == prompt)
        mine = features.served[0][here]
        for other in prompts[:8]:
            keys = features.train_keys.take(here)
            keys = replace(keys, prompt_id=np.full(len(here), other, dtype=np.int32))
            there = np.flatnonzero(lookup(keys, features.train.trace.rows) >= 0)
            if other == prompt or len(there) < max(2, len(here) // 4):
                continue
            error = channel_error(mine[there], features.train_at(0, keys=keys.take(there)))
            if error <= features.allowed[features.sites[0]]:
                swapped.append(f"prompt {prompt} has the rows of prompt {other}")
    return f"serving: {clipped(swapped, 3)} (of the training's numbers)" if swapped else None


CAUSE = Cause(
    "features-degenerate",
    "Trains fine, serves at about 0.",
    "Zero rows, equal layers, rows that never change, rows that belong to another prompt, on either side.",
    "Repair the extractor, take the features again, train again.",
    ("target.hidden.0",),
    check,
)
