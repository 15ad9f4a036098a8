"""Whether a row of the features that differs is still its own: what other experts make of it, and what they cannot.

A token that a router sent elsewhere has another vector added to a stream that is otherwise its own. How much of it that
is depends on the model (of small ones with random weights as much as the stream itself), so no bound on the error
tells it from a fault. These do: it is finite and not zero, its length is about what it was, it has not merely been
scaled, and it is nobody else's: no other row of the reference, and no other feature of the same row, is clearly nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import to_float32
from eagle_trace.reader import Trace, ValueReader
from eagle_trace_analysis.comparison.margins import Row
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]
Float64 = NDArray[np.float64]

#: length of a row that other experts computed, over its length in the reference
LENGTHS = (0.5, 2.0)
#: a vector that others add lies along the stream by at most this share of its square
ALONG = 0.9
#: another row is taken for the one that was fed if it is this much nearer than the row's own
CLEARLY = 0.5
#: rows on either side of each one, and rows spread over all prompts, that it may have been taken from
AROUND, SPREAD = 2, 192
#: rows looked at together, which bounds the memory
BLOCK = 256


def keeps_values(train: Trace, serve: Trace, sites: Sequence[str]) -> bool:
    """Whether both traces hold the values of some sites, in one shape."""
    found = [trace.site_data(site) for trace in (train, serve) for site in sites]
    return all(len(data) == 1 and data[0].has_values for data in found)


def not_its_own(
    train: Trace, serve: Trace, pairs_of: Callable[[str], Pairs], moved: Mapping[str, Sequence[Row]]
) -> str | None:
    """Why one of the rows cannot be what other experts made of it, in words; None if all can.

    Args:
        train, serve: two traces that keep the values of the sites (`keeps_values`).
        pairs_of: pairs of a site.
        moved: of each site the rows that differ there.
    """
    sites = {site: _Site(train, serve, site, pairs_of(site)) for site in moved}
    for site, rows in moved.items():
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            for at, word in sites[site].foreign(block, [one for one in sites.values() if one.name != site]):
                return f"root {block[at][1]} of prompt {block[at][0]} {word} at {site}, as no other expert makes a row"
    return None


class _Site:
    """One of the features, on both sides."""

    def __init__(self, train: Trace, serve: Trace, name: str, pairs: Pairs) -> None:
        self.name, self._pairs = name, pairs
        self._train, self._serve = (ValueReader(trace.site_data(name)[0]) for trace in (train, serve))
        keys = pairs.train_keys.take(pairs.train)
        self._rows: list[Row] = list(zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True))
        self._place = {row: at for at, row in enumerate(self._rows)}

    def trained(self, places: Int) -> Float64:
        """Rows [N, G] of the reference at some pairs."""
        return to_float32(self._train.take(self._pairs.train[places])).astype(np.float64)

    def foreign(self, rows: Sequence[Row], others: Sequence[_Site]) -> list[tuple[int, str]]:
        """Which of the rows are not their own, and what they are, in words."""
        places = np.array([self._place[row] for row in rows], dtype=np.int64)
        x = to_float32(self._serve.take(self._pairs.serve[places])).astype(np.float64)
        y = self.trained(places)
        norms, own = np.linalg.norm(y, axis=1), np.linalg.norm(x - y, axis=1)
        length = np.linalg.norm(x, axis=1) / norms
        along = ((x - y) * y).sum(axis=1) ** 2 / (own * norms) ** 2
        taken, nearest = self._nearest(rows, places, x)
        found = []
        for at in range(len(rows)):
            if not np.isfinite(x[at]).all() or not np.isfinite(y[at]).all():
                found.append((at, "is not finite"))
            elif not x[at].any() or not y[at].any():
                found.append((at, "is zero"))
            elif not LENGTHS[0] <= length[at] <= LENGTHS[1]:
                found.append((at, f"is {length[at]:.2g} times as long as in the reference"))
            elif along[at] > ALONG:
                found.append((at, f"is the reference's times {1 + ((x[at] - y[at]) @ y[at]) / norms[at] ** 2:.2g}"))
            elif nearest[at] < CLEARLY * own[at]:
                prompt, root = taken[at]
                found.append((at, f"is nearer to root {root} of prompt {prompt} than to its own"))
            elif (other := self._other_feature(rows[at], x[at], own[at], others)) is not None:
                found.append((at, f"is nearer to {other} than to its own"))
        return found

    def _nearest(self, rows: Sequence[Row], places: Int, x: Float64) -> tuple[list[Row], Float64]:
        """Of each row the other row of the reference that is nearest, and how far it is."""
        near = {
            self._place[prompt, root + by]
            for prompt, root in rows
            for by in range(-AROUND, AROUND + 1)
            if (prompt, root + by) in self._place
        }
        spread = np.linspace(0, len(self._rows) - 1, min(len(self._rows), SPREAD)).astype(np.int64)
        among = np.array(sorted(near | set(spread.tolist())), dtype=np.int64)
        values = self.trained(among)
        squares = (x**2).sum(axis=1)[:, None] + (values**2).sum(axis=1)[None, :] - 2 * x @ values.T
        squares[among[None, :] == places[:, None]] = np.inf
        squares = np.where(np.isfinite(squares), np.maximum(squares, 0.0), np.inf)
        best = squares.argmin(axis=1)
        return [self._rows[among[at]] for at in best], np.sqrt(squares[np.arange(len(rows)), best])

    def _other_feature(self, row: Row, x: Float64, own: float, others: Sequence[_Site]) -> str | None:
        for other in others:
            if (at := other._place.get(row)) is not None:
                y = other.trained(np.array([at]))[0]
                if y.shape == x.shape and np.linalg.norm(x - y) < CLEARLY * own:
                    return other.name
        return None
