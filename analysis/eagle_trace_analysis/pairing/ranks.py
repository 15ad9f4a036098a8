"""Ranks of one recording held against each other: what several of them hold alike must be the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import SiteData, Trace, ValueReader, match_rows, read_keys, read_statistics

_BLOCK = 1024


@dataclass(frozen=True)
class RankFinding:
    """Where two ranks that should hold the same do not.

    Attributes:
        what: site, or canonical name of a parameter.
        first, other: the ranks.
        rows: rows compared (1 for a parameter).
        differing: rows that are not the same, bit by bit (by statistics, where no values were kept).
        largest: largest relative difference of a row, |other - first| / |first|; of norms for a parameter, and where
            no values were kept.
        unpaired: rows that one of the two has and the other has not.
    """

    what: str
    first: int
    other: int
    rows: int
    differing: int
    largest: float
    unpaired: int = 0

    @property
    def text(self) -> str:
        """One clause."""
        words = f"{self.differing} of {self.rows} rows of rank {self.other} are not those of rank {self.first}"
        words += f", largest relative difference {self.largest:.2g}"
        if self.unpaired:
            words += f", and {self.unpaired} rows have one of the two only"
        return f"{self.what}: {words}"


def check_ranks(trace: Trace) -> list[RankFinding]:
    """Sites and parameters that are not alike on all ranks that hold them alike; [] for a trace of one rank.

    Raises:
        TraceError: a file cannot be read.
    """
    found = [finding for site in trace.sites for copy in trace.copies(site) if (finding := _compare(site, *copy))]
    if trace.manifest.ended_early:
        # each rank stopped where its own disk let it: rows that one of them lacks are no difference
        found = [replace(finding, unpaired=0) for finding in found if finding.differing]
    return found + list(_params(trace))


def _compare(site: str, first: int, one: SiteData, other: int, two: SiteData) -> RankFinding | None:
    at = match_rows([read_keys(one), read_keys(two)])
    count = one.rows if at is None else len(at[0])
    unpaired = one.rows + two.rows - 2 * count
    rows = at if at is not None else [np.arange(count)] * 2
    if one.has_values and two.has_values:
        parts = list(_blocks(one, two, rows[0], rows[1]))
        errors = np.concatenate(parts) if parts else np.zeros(0)
    else:
        a, b = (read_statistics(data) for data in (one, two))
        pairs = [(getattr(a, name)[rows[0]], getattr(b, name)[rows[1]]) for name in ("norm", "absmax", "mean")]
        same = np.logical_and.reduce([x == y for x, y in pairs])
        errors = np.where(same, np.nan, _relative(np.abs(pairs[0][1] - pairs[0][0]), np.abs(pairs[0][0])))
    differ = ~np.isnan(errors)
    if not differ.any() and not unpaired:
        return None
    return RankFinding(site, first, other, count, int(differ.sum()), float(errors[differ].max(initial=0.0)), unpaired)


def _blocks(
    one: SiteData, two: SiteData, at: NDArray[np.int64], there: NDArray[np.int64]
) -> Iterator[NDArray[np.float64]]:
    """Relative difference of each pair of rows, NaN where they are the same bits."""
    first, other = ValueReader(one, 0), ValueReader(two, 0)
    for start in range(0, len(at), _BLOCK):
        y, x = first.take(at[start : start + _BLOCK]), other.take(there[start : start + _BLOCK])
        bits = [np.ascontiguousarray(side).view(np.uint8).reshape(len(side), -1) for side in (x, y)]
        errors = np.full(len(y), np.nan)
        differ = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
        y64, x64 = y[differ].astype(np.float64), x[differ].astype(np.float64)
        errors[differ] = _relative(np.linalg.norm(x64 - y64, axis=1), np.linalg.norm(y64, axis=1))
        yield errors


def _relative(size: NDArray[np.float64], of: NDArray[np.float64]) -> NDArray[np.float64]:
    """``size / of``; infinite where `of` is 0 or something is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = size / of
    return np.where(np.isfinite(quotient), quotient, np.inf)


def _params(trace: Trace) -> Iterator[RankFinding]:
    """Parameters that are not sharded, and whose bytes differ."""
    first: dict[tuple[int, str, str, int | None], tuple[int, str, float]] = {}
    for rank, rows in trace.params_by_rank():
        for row in rows:
            key = rank.dp_rank, row["name"], row["canonical_name"], row["shard_index"]
            number, digest, norm = first.setdefault(key, (rank.rank, row["digest"], row["norm"]))
            if row["digest"] != digest:
                largest = float(_relative(np.array([abs(row["norm"] - norm)]), np.array([abs(norm)]))[0])
                yield RankFinding(str(row["canonical_name"]), number, rank.rank, 1, 1, largest)
