"""One site of both traces, as a fold: parts that can be compared anywhere, in any order, and added up in one order.

`partition` cuts the pairs of a site into `Part`s of bounded size; where it cuts depends on the data alone.
`compare_values` compares one part: a pure function of what can be pickled, which opens the files it needs itself.
`SiteFold` puts the results together in the order of the parts. So the numbers are the same to the last bit whoever
runs the parts (`eagle_trace_analysis.comparison.fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, Array, Statistics, to_float32
from eagle_trace.reader import SiteData, SketchReader, Trace, ValueReader
from eagle_trace_analysis.comparison.metrics import ANY_NUMBERS, Logits, Metrics, quantile, stats_error
from eagle_trace_analysis.comparison.sums import Accumulator, Sums
from eagle_trace_analysis.comparison.worst import WorstRows, statistics_of, worst_of
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]

#: value bytes of the train side in a part: large enough that opening its files costs little beside reading them
PART_BYTES = 8 << 20
#: a part may grow to this where cutting it earlier would have much of the serve side decoded twice
LARGEST_PART_BYTES = 128 << 20
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Compared:
    """One site at one step.

    Attributes:
        metrics: the figures.
        worst: pair with the largest rho (the first with a non-finite element, if there is one).
        pairs: which pairs (indices into `Pairs`) belong to the step, int64 [P].
        errors: rho of each of them, float64 [P].
        logits: what only logits have, of each of them; None for other sites.
        worst_rows: the rows of `worst` on both sides, [1, W] each, where they came by.
        statistics: the recorded statistics of `worst` on the train and the serve side, where they came by.
    """

    metrics: Metrics
    worst: int
    pairs: Int
    errors: NDArray[np.float64]
    logits: Logits | None = None
    worst_rows: WorstRows | None = None
    statistics: tuple[Statistics, Statistics] | None = None


@dataclass(frozen=True)
class Partial:
    """What comes of a part, at one step.

    Attributes:
        sums: over its pairs, in the order of the part.
        worst: the worst of them; None where a side's rows lie in several tables.
    """

    sums: Sums
    worst: WorstRows | None


@dataclass(frozen=True)
class Half:
    """One side of a part: its rows, and the row groups that hold them.

    Attributes:
        data: what the trace holds of the site, with no row groups but those needed.
        starts: number of the first row of each of `data`.
        index: row numbers, counted through all of `data`, int64 [P].
    """

    data: tuple[SiteData, ...]
    starts: tuple[int, ...]
    index: Int


@dataclass(frozen=True)
class Part:
    """A run of pairs of one site, sorted by train row; can be pickled.

    Attributes:
        site: name of the site.
        train, serve: the rows of each side.
        step: of each pair, int32 [P].
        bytes: memory that comparing the part takes, about.
    """

    site: str
    train: Half
    serve: Half
    step: NDArray[np.int32]
    bytes: int


class _Groups:
    """Row groups of one site of one trace, numbered through all its `SiteData`."""

    def __init__(self, data: Sequence[SiteData], first_row: Sequence[int] | None = None) -> None:
        self.data = data
        self.first_row = first_row or [0, *np.cumsum([one.rows for one in data]).tolist()][:-1]
        self.starts = np.array(
            [row + group.start for one, row in zip(data, self.first_row, strict=True) for group in one.groups],
            dtype=np.int64,
        )
        self.bytes = np.array(
            [group.rows * one.width * DTYPES[one.dtype].itemsize for one in data for group in one.groups],
            dtype=np.int64,
        )

    def of(self, index: Int) -> Int:
        """Row group of each row number."""
        return np.searchsorted(self.starts, index, side="right") - 1

    def half(self, index: Int, *, whole: bool = False) -> Half:
        """The rows at `index`, with the row groups that hold them (or all)."""
        used = np.full(len(self.starts), whole)
        used[self.of(index)] = True
        kept, first = [], 0
        for one in self.data:
            mine = used[first : first + len(one.groups)]
            first += len(one.groups)
            kept.append(replace(one, groups=tuple(one.groups[k] for k in np.flatnonzero(mine))))
        return Half(tuple(kept), tuple(self.first_row), index)


class SiteReader:
    """Rows of a site, numbered through all its `SiteData`.

    Args:
        readers: one for each `SiteData`.
        starts: number of the first row of each; one behind the other if None.
    """

    def __init__(self, readers: Sequence[ValueReader | SketchReader], starts: Sequence[int] | None = None) -> None:
        self._readers = readers
        self._starts = np.array(starts or [0, *np.cumsum([one.data.rows for one in readers])[:-1]])

    def take(self, index: Int) -> Array:
        """Rows at `index`, as they are where one reader has them all, else float32."""
        if len(self._readers) == 1:
            return self._readers[0].take(index)
        which = np.searchsorted(self._starts, index, side="right") - 1
        out = np.empty((len(index), self._readers[0].width), dtype=np.float32)
        for number in np.unique(which):
            at = np.flatnonzero(which == number)
            out[at] = to_float32(self._readers[number].take(index[at] - self._starts[number]))
        return out


def _reader(half: Half, cache_bytes: int) -> SiteReader:
    return SiteReader([ValueReader(one, cache_bytes) for one in half.data], half.starts)


def partition(train: Trace, serve: Trace, site: str, pairs: Pairs) -> list[Part]:
    """Cut the pairs of a site at row groups of the train side into parts of `PART_BYTES` or a little more.

    A part holds its train side in memory and reads each row group of the serve side once. Where the two sides' orders
    differ so much that a cut would have more than half a part's bytes read again, the part grows, up to
    `LARGEST_PART_BYTES`. (A single row group may be larger than any bound.)
    """
    left, right = _Groups(train.site_data(site)), _Groups(serve.site_data(site))
    group_t, group_s = left.of(pairs.train), right.of(pairs.serve)
    step_P = pairs.train_keys.step[pairs.train]
    edges = np.flatnonzero(np.diff(group_t, prepend=-1))
    sizes = left.bytes[group_t[edges]]
    again = _read_again(right, group_s)[edges]
    cuts, held = [0], 0
    for k in range(1, len(edges)):
        held += int(sizes[k - 1])
        if held + sizes[k] > LARGEST_PART_BYTES or (held >= PART_BYTES and 2 * again[k] <= held):
            cuts.append(int(edges[k]))
            held = 0
    parts = []
    for start, stop in zip(cuts, [*cuts[1:], len(pairs)], strict=True):
        memory = int(left.bytes[np.unique(group_t[start:stop])].sum() + right.bytes[group_s[start:stop]].max())
        halves = left.half(pairs.train[start:stop]), right.half(pairs.serve[start:stop])
        parts.append(Part(site, *halves, step_P[start:stop], memory))
    return parts


def _read_again(groups: _Groups, group_of: Int) -> Int:
    """Bytes of row groups that both sides of a cut before each pair need, int64 [P]."""
    used, first = np.unique(group_of, return_index=True)
    last = len(group_of) - 1 - np.unique(group_of[::-1], return_index=True)[1]
    change = np.zeros(len(group_of) + 1, dtype=np.int64)
    np.add.at(change, first + 1, groups.bytes[used])
    np.add.at(change, last + 1, -groups.bytes[used])
    return np.cumsum(change)[:-1]


@ANY_NUMBERS
def compare_values(part: Part) -> dict[int, Partial]:
    """Compare the exact values of a part, step by step: {step: what comes of its pairs, in the order of the part}.

    Memory: the part's train side, one row group of the serve side, and some numbers per row. Both sides must hold
    values, all of one width.
    """
    left = _reader(part.train, part.bytes)
    right = _reader(part.serve, 0)
    width = part.train.data[0].width
    exact = len(part.train.data) == len(part.serve.data) == 1
    worst: dict[int, WorstRows] = {}
    totals, place = {}, np.empty(len(part.step), dtype=np.int64)
    for step in np.unique(part.step):
        mine = np.flatnonzero(part.step == step)
        place[mine] = np.arange(len(mine))
        totals[int(step)] = Accumulator(width, len(mine), logits=part.site == "logits")
    # in the order of the serve side, so that each of its row groups is decoded once
    order = np.argsort(part.serve.index, kind="stable")
    edges = np.flatnonzero(np.diff(_Groups(part.serve.data, part.serve.starts).of(part.serve.index[order]), prepend=-1))
    rows = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start, stop in zip(edges, [*edges[1:], len(order)], strict=True):
        for first in range(int(start), int(stop), rows):
            chunk = order[first : min(first + rows, int(stop))]
            for step in np.unique(part.step[chunk]):
                at = chunk[part.step[chunk] == step]
                x_TW, y_TW = right.take(part.serve.index[at]), left.take(part.train.index[at])
                totals[int(step)].add(x_TW, y_TW, place[at])
                if exact:
                    found = worst_of(totals[int(step)].sums, place[at], x_TW, y_TW)
                    if found.beats(worst.get(int(step))):
                        # a copy: the rows are views of what is read next
                        worst[int(step)] = replace(found, train=found.train.copy(), serve=found.serve.copy())
    return {step: Partial(total.sums, worst.get(step)) for step, total in totals.items()}


class SiteFold:
    """One site on its way through the fold: give the result of `compare` for each part, in order, to `add`.

    Attributes:
        site: name of the site.
        pairs: its pairs.
        parts: what is to be compared.
        compare: compares a part.
    """

    def __init__(self, site: str, pairs: Pairs, parts: list[Part], compare: Callable[[Part], Any]) -> None:
        self.site = site
        self.pairs = pairs
        self.parts = parts
        self.compare = compare

    def add(self, partial: Any) -> None:
        """Take the result of the next part."""
        raise NotImplementedError

    def result(self) -> dict[int, Compared]:
        """The figures of each step, after the last part."""
        raise NotImplementedError


class ValuesFold(SiteFold):
    """A site by its exact values. Both sides must hold them, all of one width."""

    def __init__(self, train: Trace, serve: Trace, site: str, pairs: Pairs) -> None:
        super().__init__(site, pairs, partition(train, serve, site, pairs), compare_values)
        self._step_P = pairs.train_keys.step[pairs.train]
        steps, counts = np.unique(self._step_P, return_counts=True)
        width, logits = train.site_data(site)[0].width, site == "logits"
        self._sums = {
            int(step): Sums.zeros(int(count), width, logits=logits) for step, count in zip(steps, counts, strict=True)
        }
        self._filled = dict.fromkeys(self._sums, 0)
        self._worst: dict[int, WorstRows] = {}

    def add(self, partial: dict[int, Partial]) -> None:
        """Take the sums of the next part."""
        for step, part in partial.items():
            first = self._filled[step]
            self._sums[step].put(first, part.sums)
            self._filled[step] += len(part.sums.error)
            if part.worst is not None:
                worst = replace(part.worst, place=first + part.worst.place)
                if worst.beats(self._worst.get(step)):
                    self._worst[step] = worst

    def result(self) -> dict[int, Compared]:
        """The figures of each step."""
        at = {step: np.flatnonzero(self._step_P == step) for step in self._sums}
        return {step: _compared(sums, at[step], self._worst.get(step)) for step, sums in self._sums.items()}


def _compared(sums: Sums, at: Int, rows: WorstRows | None) -> Compared:
    rho = sums.rho
    worst = int(sums.faulty.argmax()) if sums.faulty.any() else int(rho.argmax())
    kept = rows if rows is not None and rows.place == worst else None
    return Compared(sums.result(), int(at[worst]), at, rho, sums.logits, kept)


class WholeSite(SiteFold):
    """A site in one part, whose result is the site's: for what is small beside the values."""

    def __init__(
        self, train: Trace, serve: Trace, site: str, pairs: Pairs, compare: Callable[[Part], dict[int, Compared]]
    ) -> None:
        left = _Groups(train.site_data(site)).half(pairs.train, whole=True)
        right = _Groups(serve.site_data(site)).half(pairs.serve, whole=True)
        part = Part(site, left, right, pairs.train_keys.step[pairs.train], 64 * len(pairs))
        super().__init__(site, pairs, [part], compare)
        self._found: dict[int, Compared] = {}

    def add(self, partial: dict[int, Compared]) -> None:
        """Take the result of the only part."""
        self._found = partial

    def result(self) -> dict[int, Compared]:
        """The figures of each step."""
        return self._found


@ANY_NUMBERS
def compare_statistics(part: Part) -> dict[int, Compared]:
    """Compare a whole site by the statistics of its rows, where a side holds no values; rho is a lower bound."""
    width = part.train.data[0].width
    y, x = (statistics_of(half.data, half.index) for half in (part.train, part.serve))
    rho = stats_error(x, y, width)
    found = {}
    for step in np.unique(part.step):
        at = np.flatnonzero(part.step == step)
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
        row = at[[worst]]
        found[int(step)] = Compared(metrics, int(row[0]), at, rho[at], statistics=(y.take(row), x.take(row)))
    return found
