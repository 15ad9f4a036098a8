"""Features that are right and at the wrong row, inside the server: which rows, and whose features they hold.

A fault may touch some rows only, such as those behind a verify round. Errors over all rows together do not show it: so
each row is asked by itself whether it holds its own feature, and the bad ones are looked for elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import Features

Int = NDArray[np.int64]
Real = NDArray[Any]

#: the worst row against the median channel (`eagle_trace_analysis.replay.replay.SPREAD`)
ROW = 4.0
#: other requests' rows that are tried for each bad one
MOST_OTHERS = 64
#: share of the bad rows that must be found elsewhere
ENOUGH = 0.5


@dataclass(frozen=True)
class Misplaced:
    """Rows that hold another row's feature.

    Attributes:
        shift: how many rows away in the same request (-1: one position late); 0 for another request's rows.
        words: which rows, and whose features they hold.
    """

    shift: int
    words: str


def misplaced(context: Context) -> Misplaced | None:
    """Whose features the server's bad rows hold; None if none is bad, or if that is not known.

    Where the two sides saw other tokens, their features differ for that and say nothing of places.
    """
    features = context.features
    if features is None or context.unequal_prompts:
        return None
    if features.single or features.healthy or len(features.served) != len(features.sites):
        return None
    x, y = features.served[0], features.trained[0]
    if x.shape != y.shape:
        return None
    scale = _scale(y)
    limit = ROW * features.allowed[features.sites[0]]
    bad = np.flatnonzero(_row_error(x, y, scale) > limit)
    if len(bad) < 2:
        return None
    which = row_words(features.serve_keys, bad)
    keys, mine = features.train_keys.take(bad), x[bad]
    found = {shift: _row_error(mine, features.train_at(0, keys=keys, shift=shift), scale) for shift in (-1, 1)}
    counts = {shift: int((error <= limit).sum()) for shift, error in found.items()}
    best = max(counts, key=counts.__getitem__)
    if counts[best] >= max(2, ENOUGH * len(bad)):
        words = f"{which}: {counts[best]} of {len(bad)} bad rows hold the feature of root {best:+d}, one position "
        return Misplaced(best, words + ("late" if best < 0 else "early"))
    others = _others(features, bad, limit, scale)
    if others is None or sum(others.values()) < max(2, ENOUGH * len(bad)):
        return None
    names = ", ".join(f"{_name(features, a)} has those of {_name(features, b)}" for (a, b), _ in others.most_common(3))
    words = f"{which}: {sum(others.values())} of {len(bad)} bad rows hold another request's feature ({names})"
    return Misplaced(0, words)


def row_words(keys: Rows, bad: Int) -> str:
    """Which step-0 rows are bad, in words: of the prefill, or behind which verify rounds, and of how many requests."""
    marked = np.zeros(len(keys), dtype=np.bool_)
    marked[bad] = True
    behind = keys.round > 0
    said = []
    for name, here in (("prefill", ~behind), ("behind a verify round", behind)):
        if here.any():
            said.append(f"{int((marked & here).sum())} of {int(here.sum())} rows {name}")
    rounds = np.unique(keys.round[marked & behind])
    if len(rounds):
        said[-1] += f" (rounds {rounds[0]} to {rounds[-1]})" if len(rounds) > 1 else f" (round {rounds[0]})"
    requests = len(np.unique(keys.prompt_id[marked]))
    return f"step 0, {' and '.join(said)} are wrong, in {requests} of {len(np.unique(keys.prompt_id))} requests"


def _scale(y: Real) -> Real:
    """RMS of each channel, so that a huge one does not speak for all."""
    finite = np.where(np.isfinite(y), y, 0.0).astype(np.float64)
    scale = np.sqrt((finite * finite).mean(axis=0))
    return np.where(scale > 0, scale, 1.0)


def _row_error(x: Real, y: Real, scale: Real) -> Real:
    """RMS over channels of each row's difference, each channel in units of its own RMS; inf where a row is not."""
    if x.shape != y.shape:
        return np.full(len(x), np.inf)
    d = (x.astype(np.float64) - y) / scale
    error = np.sqrt((d * d).mean(axis=1))
    return np.where(np.isfinite(error), error, np.inf)


def _others(features: Features, bad: Int, limit: float, scale: Real) -> Counter[tuple[int, int]] | None:
    """How many bad rows hold the feature of a row at the same place in another request of the same forward."""
    rows = features.serve.trace.rows
    rows = rows.take(np.flatnonzero(rows.step == 0))
    numbers = dict(zip(features.serve_keys.prompt_id.tolist(), features.train_keys.prompt_id.tolist(), strict=True))
    places: dict[tuple[int, int], list[int]] = {}
    mine: dict[tuple[int, int], int] = {}
    count: Counter[tuple[int, int]] = Counter()
    for row in np.lexsort((rows.root, rows.prompt_id, rows.call_id)):
        prompt, call, root = int(rows.prompt_id[row]), int(rows.call_id[row]), int(rows.root[row])
        place = count[call, prompt]
        count[call, prompt] += 1
        mine[prompt, root] = place
        if prompt in numbers:
            places.setdefault((call, place), []).append(int(row))
    pairs = []
    for at in bad:
        prompt, root = int(features.serve_keys.prompt_id[at]), int(features.serve_keys.root[at])
        there = places.get((int(features.serve_keys.call_id[at]), mine.get((prompt, root), -1)), [])
        pairs += [(int(at), row) for row in there if rows.prompt_id[row] != prompt][:MOST_OTHERS]
    if not pairs:
        return None
    at, theirs = np.array([one for one, _ in pairs]), rows.take(np.array([row for _, row in pairs]))
    mapped = np.array([numbers[int(number)] for number in theirs.prompt_id], dtype=np.int32)
    error = _row_error(features.served[0][at], features.train_at(0, keys=replace(theirs, prompt_id=mapped)), scale)
    held: Counter[tuple[int, int]] = Counter()
    for one in np.unique(at):
        best = int(np.flatnonzero(at == one)[error[at == one].argmin()])
        if error[best] <= limit:
            held[int(features.serve_keys.prompt_id[one]), int(theirs.prompt_id[best])] += 1
    return held


def _name(features: Features, number: int) -> str:
    prompts = features.serve.trace.prompts
    return repr(str(prompts["prompt_key"][prompts["prompt_id"] == number].iloc[0]))
