"""Values of one site of both traces, streamed row group by row group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, Array, Statistics, row_statistics, to_float32
from eagle_trace.reader import SiteData, Trace, ValueReader, read_statistics
from eagle_trace_analysis.metrics import Accumulator, Metrics, quantile, stats_error
from eagle_trace_analysis.pairs import Pairs

Int = NDArray[np.int64]

#: the train side is read in order, so a row group or two are enough; the serve side's order is its own
TRAIN_CACHE_BYTES = 8 << 20
LARGEST_CACHE_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Compared:
    """One site at one step.

    Attributes:
        metrics: the figures.
        worst: pair with the largest rho (the first with a non-finite element, if there is one).
        largest_errors: of logits, the largest error of each pair, float64 [P]; else empty.
        pairs: which pairs (indices into `Pairs`) belong to the step, int64 [P].
    """

    metrics: Metrics
    worst: int
    largest_errors: NDArray[np.float64]
    pairs: Int


class _Side:
    """Rows of one site of one trace, numbered through all its `SiteData`."""

    def __init__(self, data: list[SiteData], cache_bytes: int) -> None:
        self.data = data
        self.starts = np.cumsum([0, *(one.rows for one in data)])[:-1]
        self._readers = [ValueReader(one, cache_bytes) for one in data]

    @property
    def group_starts(self) -> Int:
        """First row of every row group."""
        starts = [
            start + group.start for one, start in zip(self.data, self.starts, strict=True) for group in one.groups
        ]
        return np.array(starts, dtype=np.int64)

    def take(self, index: Int) -> Array:
        """Rows at `index`, in the recorded dtype where they share one, else float32."""
        if len(self._readers) == 1:
            return self._readers[0].take(index)
        which = np.searchsorted(self.starts, index, side="right") - 1
        out = np.empty((len(index), self.data[0].width), dtype=np.float32)
        for number in np.unique(which):
            at = np.flatnonzero(which == number)
            out[at] = to_float32(self._readers[number].take(index[at] - self.starts[number]))
        return out


def compare_values(train: Trace, serve: Trace, site: str, pairs: Pairs) -> dict[int, Compared]:
    """Compare the exact values of a site, step by step.

    Peak memory is the two readers' caches plus some numbers a row; it does not grow with the bytes of the
    site. Both sides must hold values, all of one width.
    """
    left = _Side(train.site_data(site), TRAIN_CACHE_BYTES)
    right = _Side(serve.site_data(site), _cache_for(serve.site_data(site), pairs.serve))
    width = left.data[0].width
    step_P = pairs.train_keys.step[pairs.train]
    steps, counts = np.unique(step_P, return_counts=True)
    sums = {
        int(step): Accumulator(width, int(count), logits=site == "logits")
        for step, count in zip(steps, counts, strict=True)
    }
    edges = np.searchsorted(pairs.train, left.group_starts)
    rows = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start, stop in zip(edges, [*edges[1:], len(pairs)], strict=True):
        for first in range(int(start), int(stop), rows):
            last = min(first + rows, int(stop))
            here = step_P[first:last]
            if (here == here[0]).all():
                sums[int(here[0])].add(right.take(pairs.serve[first:last]), left.take(pairs.train[first:last]))
                continue
            for step in np.unique(here):
                at = first + np.flatnonzero(here == step)
                sums[int(step)].add(right.take(pairs.serve[at]), left.take(pairs.train[at]))
    del left, right
    # Arrow keeps what its buffers leave behind, and the next site's are of another size
    pa.default_memory_pool().release_unused()
    return {step: _compared(total, np.flatnonzero(step_P == step)) for step, total in sums.items()}


def _cache_for(data: list[SiteData], order: Int) -> int:
    """Bytes of row groups to keep so that each is decoded once (if that is not too much) when read in this
    order.

    A row group is live from its first row in `order` to its last one. Twice the most that is live at any
    time, because the cache keeps what was used last, live or not.
    """
    sizes = [group.rows * one.width * DTYPES[one.dtype].itemsize for one in data for group in one.groups]
    starts = np.cumsum([0, *(group.rows for one in data for group in one.groups)])[:-1]
    group_of = np.searchsorted(starts, order, side="right") - 1
    used, first = np.unique(group_of, return_index=True)
    last = len(order) - 1 - np.unique(group_of[::-1], return_index=True)[1]
    change = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(change, first, np.array(sizes, dtype=np.int64)[used])
    np.add.at(change, last + 1, -np.array(sizes, dtype=np.int64)[used])
    return min(LARGEST_CACHE_BYTES, TRAIN_CACHE_BYTES + 2 * int(np.cumsum(change).max()))


def _compared(total: Accumulator, at: Int) -> Compared:
    worst = int(total.faulty_T.argmax()) if total.faulty_T.any() else int(total.rho.argmax())
    return Compared(total.result(), int(at[worst]), total.largest_errors(), at)


def compare_statistics(train: Trace, serve: Trace, site: str, pairs: Pairs) -> dict[int, Compared]:
    """Compare a site by the statistics of its rows, where a side holds no values; rho is a lower bound."""
    width = train.site_data(site)[0].width
    y, x = paired_statistics(train, site, pairs.train), paired_statistics(serve, site, pairs.serve)
    rho = stats_error(x, y, width)
    step_P = pairs.train_keys.step[pairs.train]
    found = {}
    for step in np.unique(step_P):
        at = np.flatnonzero(step_P == step)
        faulty = (x.nonfinite[at] > 0) | (y.nonfinite[at] > 0)
        metrics = Metrics(
            rows=len(at),
            rho_median=quantile(rho[at], 0.5),
            rho_p99=quantile(rho[at], 0.99),
            rho_max=quantile(rho[at], 1.0),
            nonfinite_train=int(y.nonfinite[at].sum()),
            nonfinite_serve=int(x.nonfinite[at].sum()),
            basis="stats",
        )
        worst = int(faulty.argmax()) if faulty.any() else int(rho[at].argmax())
        found[int(step)] = Compared(metrics, int(at[worst]), np.zeros(0), at)
    return found


def paired_statistics(trace: Trace, site: str, index: Int) -> Statistics:
    """Statistics of some rows of a site, numbered through all its `SiteData`."""
    parts = [read_statistics(one) for one in trace.site_data(site)]
    columns = [
        np.concatenate([getattr(part, name) for part in parts])[index]
        for name in ("norm", "absmax", "mean", "nonfinite")
    ]
    return Statistics(*columns)


def row_facts(train: Trace, serve: Trace, site: str, pairs: Pairs, pair: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape, dtype and statistics of one pair's rows; with values also the element that is furthest apart."""
    facts, values = [], []
    for trace, row in ((train, int(pairs.train[pair])), (serve, int(pairs.serve[pair]))):
        side = trace.site_data(site)
        number = int(np.searchsorted(np.cumsum([one.rows for one in side]), row, side="right"))
        data, local = side[number], row - sum(one.rows for one in side[:number])
        if data.has_values:
            values.append(ValueReader(data, 0).take(np.array([local])))
            statistics = row_statistics(values[-1])
        else:
            statistics = paired_statistics(trace, site, np.array([row]))
        facts.append({"shape": ["T", data.width], "dtype": data.dtype, **_plain(statistics)})
    if len(values) == 2:
        y, x = (to_float32(one)[0].astype(np.float64) for one in values)
        with np.errstate(invalid="ignore"):
            error = np.where(x == y, 0.0, np.nan_to_num(np.abs(x - y), nan=np.inf))
        at = int(error.argmax())
        facts[0] |= {"element": at, "element_value": float(y[at])}
        facts[1] |= {"element": at, "element_value": float(x[at])}
    return facts[0], facts[1]


def _plain(statistics: Statistics) -> dict[str, float | int]:
    return {
        "norm": float(statistics.norm[0]),
        "absmax": float(statistics.absmax[0]),
        "mean": float(statistics.mean[0]),
        "nonfinite": int(statistics.nonfinite[0]),
    }
