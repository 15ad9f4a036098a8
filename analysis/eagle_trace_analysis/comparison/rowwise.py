"""Figures row by row, for plots: what a diff sums up, read again from the traces and kept apart.

Streaming: memory grows with the number of rows, not with their width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import SiteData, Trace, ValueReader, open_trace, read_statistics
from eagle_trace_analysis.comparison.metrics import stats_error
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.sketch import has_sketch, row_errors
from eagle_trace_analysis.comparison.sums import Accumulator, Sums
from eagle_trace_analysis.pairing.align import Alignment, align, lookup, topk_starts
from eagle_trace_analysis.pairing.pairs import Pairs
from eagle_trace_analysis.pairing.roles import in_order

Float64 = NDArray[np.float64]
Int = NDArray[np.int64]

_CHUNK_BYTES = 4 << 20


def open_traces(diff: Diff, train: Trace | None = None, serve: Trace | None = None) -> tuple[Trace, Trace]:
    """The two traces a diff was made of: those given, else those at the paths it remembers.

    Raises:
        TraceNotFoundError: a trace is no longer there (pass it in).
    """
    if train is not None and serve is not None:
        train, serve = in_order(train, serve)
    found = [
        given or open_trace(str(diff.traces[side]["path"]), allow_partial=True)
        for side, given in (("train", train), ("serve", serve))
    ]
    return found[0], found[1]


@dataclass(frozen=True)
class SiteRows:
    """One site at the rows asked for; NaN where a row has no pair there.

    Attributes:
        error: rho of each row, float64 [C]; an estimate where a side holds sketches, a lower bound where it holds
            statistics only.
        train_norm, serve_norm: norm of each side's row, float64 [C].
    """

    error: Float64
    train_norm: Float64
    serve_norm: Float64


@dataclass(frozen=True)
class BestTokens:
    """The tokens each side would have drafted at the rows asked for, best first, after d2t; -1 where there is none.

    Attributes:
        train, serve: target ids, int64 [C, K].
        paired: rows that both sides have best tokens of, bool [C].
    """

    train: Int
    serve: Int
    paired: NDArray[np.bool_]

    @property
    def agree(self) -> NDArray[np.bool_]:
        """Whether both sides would draft the same token, bool [C] (False where not paired)."""
        same: NDArray[np.bool_] = self.paired & (self.train[:, 0] == self.serve[:, 0])
        return same

    @property
    def overlap(self) -> Float64:
        """Share of the best tokens that both sides name, float64 [C], NaN where not paired."""
        known = (self.train >= 0)[:, :, None] & (self.serve >= 0)[:, None, :]
        same = ((self.train[:, :, None] == self.serve[:, None, :]) & known).sum(axis=(1, 2))
        count = np.minimum((self.train >= 0).sum(axis=1), (self.serve >= 0).sum(axis=1))
        return np.where(self.paired, same / np.maximum(1, count), np.nan)


class RowFigures:
    """Row by row figures of two traces.

    Attributes:
        alignment: of the two traces.
        train, serve: the traces.
    """

    def __init__(self, train: Trace, serve: Trace) -> None:
        self.train = train
        self.serve = serve
        self.alignment: Alignment = align(train, serve)

    @classmethod
    def of(cls, diff: Diff, train: Trace | None = None, serve: Trace | None = None) -> RowFigures:
        """Of the traces of a diff (see `open_traces`)."""
        return cls(*open_traces(diff, train, serve))

    def rows(self, step: int = 0, prompt: str | None = None) -> Rows:
        """Keys (train side) of all matched draft rows of a step, by prompt and root; `prompt` is a prompt_key."""
        pairs = self.alignment.rows
        keys = pairs.train_keys.take(pairs.train)
        chosen = keys.step == step
        if prompt is not None:
            frame = self.train.prompts
            chosen &= np.isin(keys.prompt_id, frame["prompt_id"][frame["prompt_key"] == prompt])
        keys = keys.take(np.flatnonzero(chosen))
        return keys.take(np.lexsort((keys.root, keys.prompt_id)))

    def steps(self) -> list[int]:
        """Steps with matched rows."""
        pairs = self.alignment.rows
        return [int(step) for step in np.unique(pairs.train_keys.step[pairs.train])]

    def site(self, site: str, rows: Rows, *, errors: bool = True) -> SiteRows | None:
        """A value site at `rows`; None if there is nothing to compare (absent, another width, no rows kept).

        Without `errors` only the norms are read.
        """
        found = self._selected(site, rows)
        if found is None:
            return None
        column, pairs, left, right = found
        x, y = read_statistics(right), read_statistics(left)
        out = SiteRows(*(np.full(len(rows), np.nan) for _ in range(3)))
        out.train_norm[column] = y.norm[pairs.train]
        out.serve_norm[column] = x.norm[pairs.serve]
        if not errors:
            return out
        if left.has_values and right.has_values:
            out.error[column] = _stream(left, right, pairs).rho
        elif has_sketch(left) and has_sketch(right):
            out.error[column] = row_errors(left, right, pairs.train, pairs.serve, y.take(pairs.train))
        else:
            out.error[column] = stats_error(x.take(pairs.serve), y.take(pairs.train), left.width)
        return out

    def logits(self, rows: Rows) -> tuple[Float64, Float64] | None:
        """KL(train || serve) in nats and total variation at `rows`, NaN where there is no pair; None without values."""
        found = self._selected("logits", rows)
        if found is None or not (found[2].has_values and found[3].has_values):
            return None
        column, pairs, left, right = found
        figures = _stream(left, right, pairs, logits=True).logits
        kl, tv = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        if figures is not None:
            kl[column], tv[column] = figures.kl, figures.tv
        return kl, tv

    def best_tokens(self, rows: Rows) -> BestTokens:
        """The best tokens of both sides at `rows`."""
        pairs = self.alignment.pairs("topk.draft_id")
        column = lookup(pairs.train_keys.take(pairs.train), rows)
        at = np.flatnonzero(column >= 0)
        sides = [_groups(trace, index[at]) for trace, index in ((self.train, pairs.train), (self.serve, pairs.serve))]
        made = [np.full((len(rows), ids.shape[1]), -1, dtype=np.int64) for ids in sides]
        for out, ids in zip(made, sides, strict=True):
            out[column[at]] = ids
        paired = np.zeros(len(rows), dtype=np.bool_)
        paired[column[at]] = True
        return BestTokens(made[0], made[1], paired)

    def _selected(self, site: str, rows: Rows) -> tuple[Int, Pairs, SiteData, SiteData] | None:
        """Pairs of a site that belong to `rows`, and the column of each."""
        sides = [trace.site_data(site) for trace in (self.train, self.serve)]
        if any(len(data) != 1 for data in sides) or sides[0][0].width != sides[1][0].width:
            return None
        pairs = self.alignment.pairs(site)
        column = lookup(pairs.train_keys.take(pairs.train), rows)
        at = np.flatnonzero(column >= 0)
        chosen = Pairs(
            pairs.train[at], pairs.serve[at], pairs.train_keys, pairs.serve_keys, pairs.train_fate, pairs.serve_fate
        )
        return column[at], chosen, sides[0][0], sides[1][0]


def _stream(left: SiteData, right: SiteData, pairs: Pairs, *, logits: bool = False) -> Sums:
    total = Accumulator(left.width, len(pairs), logits=logits)
    y, x = ValueReader(left), ValueReader(right)
    rows = max(1, _CHUNK_BYTES // (4 * max(1, left.width)))
    for start in range(0, len(pairs), rows):
        part = slice(start, start + rows)
        total.add(x.take(pairs.serve[part]), y.take(pairs.train[part]))
    return total.sums


def _groups(trace: Trace, groups: Int) -> Int:
    """Target ids of some groups of topk.parquet, best first, int64 [len(groups), K], padded with -1."""
    table = trace.table("topk")
    target, rank = table.column("target_id").to_numpy(), table.column("rank").to_numpy()
    start = topk_starts(rank)
    count = np.diff([*start.tolist(), len(rank)])
    width = int(count[groups].max(initial=1))
    inside = np.arange(width)[None, :] < count[groups][:, None]
    at = np.where(inside, start[groups][:, None] + np.arange(width)[None, :], 0)
    if not len(target):
        return np.full((len(groups), width), -1, dtype=np.int64)
    return np.where(inside, target[at], -1)
