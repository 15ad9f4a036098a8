"""The pair of rows furthest apart: found as rows come by, kept, and told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Array, Statistics, row_statistics, to_float32
from eagle_trace.reader import SiteData, Trace, ValueReader, read_statistics
from eagle_trace_analysis.comparison.metrics import relative_error
from eagle_trace_analysis.comparison.sums import Sums
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]


@dataclass(frozen=True)
class WorstRows:
    """The pair furthest apart among those that were compared together, kept so that it need not be read again.

    Attributes:
        place: which of the pairs it is.
        faulty: whether it has elements that are not finite; the first of these is worse than any finite one.
        rho: its relative error.
        train, serve: its rows, [1, W] each, in the dtypes of the traces.
    """

    place: int
    faulty: bool
    rho: float
    train: Array
    serve: Array

    def beats(self, other: WorstRows | None) -> bool:
        """Whether this pair is worse than another, or as bad and before it."""
        if other is None or self.faulty != other.faulty:
            return other is None or self.faulty
        rank = 0.0 if self.faulty else self.rho - other.rho
        return rank > 0 or (not rank > 0 and not rank < 0 and self.place < other.place)


def worst_of(sums: Sums, place: Int, x_TW: Array, y_TW: Array) -> WorstRows:
    """The worst of the pairs at `place`, whose rows are x and y."""
    faulty = sums.faulty[place]
    if faulty.any():
        bad = np.flatnonzero(faulty)
        at, rho = int(bad[place[bad].argmin()]), float("inf")
    else:
        errors = relative_error(sums.error[place], sums.power[place])
        largest = np.flatnonzero(errors == errors.max())
        at = int(largest[place[largest].argmin()])
        rho = float(errors[at])
    row = slice(at, at + 1)
    return WorstRows(int(place[at]), bool(faulty[at]), rho, y_TW[row], x_TW[row])


def statistics_of(data: Sequence[SiteData], index: Int) -> Statistics:
    """Statistics of some rows of a site, numbered through all its `SiteData`."""
    parts = [read_statistics(one) for one in data]
    columns = [
        np.concatenate([getattr(part, name) for part in parts])[index]
        for name in ("norm", "absmax", "mean", "nonfinite")
    ]
    return Statistics(*columns)


def row_facts(
    train: Trace,
    serve: Trace,
    site: str,
    pairs: Pairs,
    pair: int,
    rows: WorstRows | None = None,
    statistics: tuple[Statistics, Statistics] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape, dtype and statistics of one pair's rows; with values also the element that is furthest apart.

    The values are read, unless `rows` has them; so are recorded statistics, unless they are given.
    """
    facts, values = [], []
    kept = (None, None) if rows is None else (rows.train, rows.serve)
    given = (None, None) if statistics is None else statistics
    for trace, row, held, recorded in (
        (train, int(pairs.train[pair]), kept[0], given[0]),
        (serve, int(pairs.serve[pair]), kept[1], given[1]),
    ):
        side = trace.site_data(site)
        number = int(np.searchsorted(np.cumsum([one.rows for one in side]), row, side="right"))
        data, local = side[number], row - sum(one.rows for one in side[:number])
        if data.has_values:
            values.append(ValueReader(data, 0).take(np.array([local])) if held is None else held)
            known = row_statistics(values[-1])
        else:
            known = statistics_of(side, np.array([row])) if recorded is None else recorded
        facts.append({"shape": ["T", data.width], "dtype": data.dtype, **_plain(known)})
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
