"""Figures row by row, kept beside a diff as it sums them up, so that plots and text need not read the values again.

Memory grows with the number of rows, not with their width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import SiteData, Trace, open_trace, read_statistics
from eagle_trace_analysis.comparison.compare import Compared
from eagle_trace_analysis.comparison.fold import Serial, fold
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.site import site_fold
from eagle_trace_analysis.pairing.align import Alignment, align
from eagle_trace_analysis.pairing.keys import lookup, topk_starts
from eagle_trace_analysis.pairing.pairs import Pairs
from eagle_trace_analysis.pairing.roles import in_order

Float64 = NDArray[np.float64]
Int = NDArray[np.int64]


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


@dataclass(frozen=True)
class PairFigures:
    """Figures of each pair of a site, in the order of its `Pairs`; NaN where a pair was not compared.

    Attributes:
        error: rho, float64 [P]; an estimate where a side holds sketches, a lower bound where it holds statistics only.
        kl, tv: of logits, KL(train || serve) in nats and total variation, float64 [P]; None for other sites.
    """

    error: Float64
    kl: Float64 | None
    tv: Float64 | None

    @classmethod
    def of(cls, count: int, steps: Iterable[Compared]) -> PairFigures:
        """Of `count` pairs that were compared step by step."""
        parts = list(steps)
        error, kl, tv = np.full((3, count), np.nan)
        for part in parts:
            error[part.pairs] = part.errors
            if part.logits is not None:
                kl[part.pairs], tv[part.pairs] = part.logits.kl, part.logits.tv
        scored = any(part.logits is not None for part in parts)
        return cls(error, kl if scored else None, tv if scored else None)


class RowFigures:
    """Row by row figures of two traces.

    What a diff compared is kept; of any other site it is read when it is asked for.

    Attributes:
        alignment: of the two traces.
        train, serve: the traces.
    """

    def __init__(self, train: Trace, serve: Trace, alignment: Alignment | None = None) -> None:
        self.train = train
        self.serve = serve
        self.alignment: Alignment = align(train, serve) if alignment is None else alignment
        self._kept: dict[str, PairFigures] = {}

    @classmethod
    def of(cls, diff: Diff, train: Trace | None = None, serve: Trace | None = None) -> RowFigures:
        """Of the traces of a diff (see `open_traces`): those it kept, unless it is said to be of others."""
        kept = diff.figures
        if kept is not None and all(one is None or one in (kept.train, kept.serve) for one in (train, serve)):
            said = [diff.traces[side]["path"] for side in ("train", "serve")]
            if said == [str(kept.train.path), str(kept.serve.path)]:
                return kept
        return cls(*open_traces(diff, train, serve))

    def keep(self, site: str, pairs: Pairs, steps: Iterable[Compared]) -> None:
        """Keep the figures of a site that was compared."""
        self._kept[site] = PairFigures.of(len(pairs), steps)

    def _figures(self, site: str, pairs: Pairs) -> PairFigures:
        if site not in self._kept:
            for done in fold([site_fold(self.train, self.serve, site, pairs)], Serial()):
                self.keep(site, pairs, done.result().values())
        return self._kept[site]

    def errors(self, site: str) -> tuple[Pairs, Float64]:
        """Pairs of a site, and the error of each (see `PairFigures`)."""
        pairs = self.alignment.pairs(site)
        return pairs, self._figures(site, pairs).error

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
        column, at, pairs, left, right = found
        x, y = read_statistics(right), read_statistics(left)
        out = SiteRows(*(np.full(len(rows), np.nan) for _ in range(3)))
        out.train_norm[column] = y.norm[pairs.train[at]]
        out.serve_norm[column] = x.norm[pairs.serve[at]]
        if errors:
            out.error[column] = self._figures(site, pairs).error[at]
        return out

    def logits(self, rows: Rows) -> tuple[Float64, Float64] | None:
        """KL(train || serve) in nats and total variation at `rows`, NaN where there is no pair; None without values."""
        found = self._selected("logits", rows)
        if found is None or not (found[3].has_values and found[4].has_values):
            return None
        column, at, pairs, _, _ = found
        kl, tv = np.full((2, len(rows)), np.nan)
        figures = self._figures("logits", pairs)
        if figures.kl is not None and figures.tv is not None:
            kl[column], tv[column] = figures.kl[at], figures.tv[at]
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

    def _selected(self, site: str, rows: Rows) -> tuple[Int, Int, Pairs, SiteData, SiteData] | None:
        """The columns of `rows` that a site has pairs of, which pairs these are, and all of its pairs."""
        sides = [trace.site_data(site) for trace in (self.train, self.serve)]
        if any(len(data) != 1 for data in sides) or sides[0][0].width != sides[1][0].width:
            return None
        pairs = self.alignment.pairs(site)
        column = lookup(pairs.train_keys.take(pairs.train), rows)
        at = np.flatnonzero(column >= 0)
        return column[at], at, pairs, sides[0][0], sides[1][0]


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
