"""A sample of one trace's rows, with the values of any site on exactly those rows.

Recomputing a step needs its inputs on the same rows as its outputs, the rows of the draft step before, and for
attention the keys and values of whole prompts. So a few prompts are taken, and in them whole chains: some of
the deepest draft steps with all rows above them, and roots spread over the prompt, the last one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows, to_float32
from eagle_trace.reader import SiteData, Trace, ValueReader, read_keys
from eagle_trace_analysis.comparison.cached import Kept
from eagle_trace_analysis.pairing.keys import above, lookup

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]
Real = NDArray[Any]

ROOTS, CHAINS, FIRST_ROOTS = 160, 64, 4
#: rows of the prompts taken together (attention reads the keys and values of all of them)
PROMPT_ROWS = 4096


@dataclass(frozen=True)
class Values:
    """Rows of a site: `values` [S, W] in float32, zeros where `present` [S] is false."""

    values: Real
    present: Bool


@dataclass(frozen=True)
class Cache:
    """What becomes of keys and values that attention reads from a cache.

    Attributes:
        kept: the dtype that they are rounded to.
        fresh: the rows of an extend take one another's keys from memory, and only those before it from the cache.
    """

    kept: Kept
    fresh: bool

    def read(self, keys: Real, here: Bool) -> Real:
        """Keys, or values, [N, heads x size] as a row sees them, of which those `here` are of its own forward."""
        rounded = self.kept.rounded(keys)
        return np.where(here[:, None], keys, rounded) if self.fresh else rounded


class Recorded:
    """Sampled rows of a trace.

    Attributes:
        trace: where they are from.
        keys: keys of the sampled rows, S of them.
        cache: how keys and values are read from the draft's cache; None for one that rounds nothing.
        dtype: what is computed in: float64 for a float32 trace (one dtype higher than its own), else float32.
    """

    def __init__(self, trace: Trace, keys: Rows) -> None:
        self.trace = trace
        self.keys = keys
        self.cache: Cache | None = None
        self.dtype = np.float64 if trace.manifest.dtype in ("float32", "float64") else np.float32
        self._values: dict[str, Values | None] = {}
        self._prompt_values: dict[tuple[str, int], tuple[Real, Rows] | None] = {}
        self._known: list[tuple[Rows, Int]] = []

    @cached_property
    def parents(self) -> Int:
        """Index of the row one draft step above each row, -1 for none, int64 [S]."""
        found = lookup(above(self.keys), self.keys)
        return np.where(self.keys.step > 0, found, -1)

    @property
    def steps(self) -> list[int]:
        """Steps that have rows."""
        return [int(step) for step in np.unique(self.keys.step)]

    def at_step(self, step: int) -> Int:
        """Indices of the rows of one step."""
        return np.flatnonzero(self.keys.step == step)

    def data(self, site: str) -> SiteData | None:
        """What the trace holds of a site with values; None if nothing, or rows of several widths."""
        found = [one for one in self.trace.site_data(site) if one.has_values]
        return found[0] if len(found) == 1 else None

    def width(self, site: str) -> int | None:
        """Elements of a row."""
        data = self.data(site)
        return data.width if data else None

    def values(self, site: str) -> Values | None:
        """Rows of a site on the sample; None if the trace holds no values of it."""
        if site not in self._values:
            self._values[site] = self.at(site, self.keys, cached=True)
        return self._values[site]

    def at(self, site: str, keys: Rows, *, cached: bool = False) -> Values | None:
        """Rows of a site at any `keys` of this trace."""
        data = self.data(site)
        if data is None:
            return None
        rows = self._rows(site, data)
        found = self._lookup(keys, rows) if cached else lookup(keys, rows)
        present = found >= 0
        values = np.zeros((len(keys), data.width), dtype=np.float32)
        order = np.argsort(found[present], kind="stable")
        at = np.flatnonzero(present)[order]
        values[at] = to_float32(ValueReader(data, 0).take(found[at]))
        return Values(values, present)

    def of_prompt(self, site: str, prompt: int) -> tuple[Real, Rows] | None:
        """All rows of a site of one prompt, with their keys."""
        if (site, prompt) not in self._prompt_values:
            data = self.data(site)
            if data is None:
                return None
            rows = self._rows(site, data)
            wanted = np.unique(self.keys.prompt_id)
            here = np.flatnonzero(np.isin(rows.prompt_id, wanted))
            values = to_float32(ValueReader(data, 0).take(here))
            kept = rows.take(here)
            for one in wanted:
                at = np.flatnonzero(kept.prompt_id == one)
                self._prompt_values[site, int(one)] = values[at], kept.take(at)
        return self._prompt_values.get((site, prompt))

    def _rows(self, site: str, data: SiteData) -> Rows:
        """Keys of all rows of `data`, which the comparison has read where it is all there is of the site."""
        return self.trace.rows_of(site) if len(self.trace.site_data(site)) == 1 else read_keys(data)

    def _lookup(self, keys: Rows, among: Rows) -> Int:
        # most sites hold the same rows, and matching them is not free
        for known, found in self._known:
            if known is among or (
                len(known) == len(among)
                and all(
                    np.array_equal(getattr(known, name), getattr(among, name))
                    for name in ("prompt_id", "root", "step", "path")
                )
            ):
                return found
        found = lookup(keys, among)
        self._known.append((among, found))
        return found


def choose(trace: Trace, first: Sequence[int] = ()) -> Rows:
    """Keys of the rows to sample.

    Args:
        trace: where from.
        first: prompts that must be among them (where something was seen to differ).
    """
    rows = trace.rows
    rows = rows.take(np.flatnonzero(rows.own_path))
    if not len(rows):
        return rows
    rows = rows.take(np.flatnonzero(np.isin(rows.prompt_id, _prompts(rows, first))))
    deep = np.flatnonzero(rows.step > 0)
    picked: list[Int] = []
    if deep.size:
        deepest = deep[rows.step[deep] == rows.step.max()]
        chain = rows.take(_spread(deepest, CHAINS))
        while len(chain):
            picked.append(lookup(chain, rows))
            deeper = np.flatnonzero(chain.step > 0)
            chain = above(chain.take(deeper)) if deeper.size else chain.take(deeper)
    roots = np.flatnonzero(rows.step == 0)
    roots = roots[np.lexsort((rows.root[roots], rows.prompt_id[roots]))]
    # the first few positions show a rotation's frequencies without wrapping around
    picked += [_spread(roots, ROOTS), roots[:FIRST_ROOTS]]
    # keys that come more than once stand for their first row
    index = np.unique(np.concatenate(picked))
    index = index[index >= 0]
    return rows.take(index[np.unique(lookup(rows.take(index), rows.take(index)))])


def _prompts(rows: Rows, first: Sequence[int]) -> Int:
    numbers, counts = np.unique(rows.prompt_id, return_counts=True)
    longest = numbers[np.argsort(-counts, kind="stable")]
    wanted = [int(one) for one in first if one in numbers]
    order = list(dict.fromkeys([*wanted, int(longest[0]), *numbers.tolist()]))
    size = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    taken: list[int] = []
    total = 0
    for prompt in order:
        if taken and total + size[prompt] > PROMPT_ROWS:
            continue
        taken.append(prompt)
        total += size[prompt]
    return np.array(taken, dtype=np.int64)


def _spread(index: Int, count: int) -> Int:
    """At most `count` of `index`, evenly spaced, first and last included."""
    if len(index) <= count:
        return index
    return index[np.linspace(0, len(index) - 1, count).astype(np.int64)]
