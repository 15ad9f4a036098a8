"""Target features of both sides on the same rows: which layer, which order, which row was fed?

"Which" is asked channel by channel: a few huge channels and the first token carry most of a hidden state's norm,
and in a good model neighbouring layers differ by a percent of it. So the error of two features is the median
over channels of (RMS difference over rows / RMS of the channel), and the nearest candidate is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.metrics import relative_error
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.tolerance import ONE_ROUNDING, UNIT, shares_features
from eagle_trace_analysis.pairing.keys import lookup
from eagle_trace_analysis.replay.recorded import Recorded

Int = NDArray[np.int64]
Real = NDArray[Any]
#: rows [R], layers [M] and their values [R, M, C] on the sampled channels
Sampled = tuple[Int, Int, Real]
ROWS = 192
#: a candidate is named only if it is this much nearer than the one it should be
CLEARLY = 0.5


def channel_error(x: Real, y: Real) -> float:
    """Median over channels of the RMS difference over the channel's RMS in y; x, y [T, G]."""
    if not len(x):
        return float("inf")
    d = (x - y).astype(np.float64)
    wide = y.astype(np.float64)
    return float(np.median(relative_error((d * d).sum(axis=0), (wide * wide).sum(axis=0))))


@dataclass
class Features:
    """Features of both sides.

    Attributes:
        train, serve: readers of both traces.
        serve_keys: keys of the serve side's sampled rows (step 0).
        train_keys: the same rows in the train side's numbering (its rows may or may not exist).
        sites: ``target.hidden.k`` of the training side.
        single: the server fed one layer's features only (its site is then ``fused``).
        allowed: channel error allowed between healthy sides, by site.
    """

    train: Recorded
    serve: Recorded
    serve_keys: Rows
    train_keys: Rows
    sites: list[str]
    single: bool
    allowed: dict[str, float]

    @classmethod
    def read(cls, train: Trace, serve: Trace, diff: Diff) -> Features | None:
        """Sample rows that both sides have; None if a side keeps no values of its features."""
        sites = [site for site in train.sites if site.startswith("target.hidden.")]
        # a server of single-layer features has no slices: `fused` is all there is
        theirs = [site for site in serve.sites if site.startswith("target.hidden.")] or ["fused"]
        if not sites or train.level != "values" or serve.level != "values" or not serve.site_data(theirs[0]):
            return None
        numbers = dict(zip(train.prompts["prompt_key"], train.prompts["prompt_id"], strict=True))
        known = {
            int(number): int(numbers[key])
            for number, key in zip(serve.prompts["prompt_id"], serve.prompts["prompt_key"], strict=True)
            if key in numbers
        }
        rows = serve.rows
        rows = rows.take(np.flatnonzero((rows.step == 0) & np.isin(rows.prompt_id, list(known))))
        if not len(rows):
            return None
        rows = rows.take(np.lexsort((rows.root, rows.prompt_id)))
        mapped = np.array([known[int(number)] for number in rows.prompt_id], dtype=np.int32)
        keyed = replace(rows, prompt_id=mapped)
        known_T = lookup(keyed, train.rows) >= 0
        if diff.tipped is not None:
            known_T &= ~diff.tipped.among(keyed)
        both = np.flatnonzero(known_T)
        if not both.size:
            return None
        both = both[np.linspace(0, len(both) - 1, min(len(both), ROWS)).astype(np.int64)]
        serve_keys = rows.take(both)
        train_keys = replace(serve_keys, prompt_id=mapped[both])
        empty = rows.take(np.zeros(0, dtype=np.intp))
        return cls(
            Recorded(train, empty),
            Recorded(serve, empty),
            serve_keys,
            train_keys,
            sites,
            theirs == ["fused"],
            _allowed(diff, train, serve, sites),
        )

    @cached_property
    def served(self) -> list[Real]:
        """What the server fed: one array [T, G] a layer (one array alone for single-layer features)."""
        sites = ["fused"] if self.single else [site for site in self.sites if self.serve.data(site)]
        found = [self.serve.at(site, self.serve_keys) for site in sites]
        return [one.values for one in found if one is not None]

    @cached_property
    def trained(self) -> list[Real]:
        """What training fed, on the same rows."""
        return [self.train_at(k) for k in range(len(self.sites))]

    def train_at(self, k: int, *, shift: int = 0, keys: Rows | None = None) -> Real:
        """Feature k of training at root + shift; rows that do not exist are NaN."""
        keys = self.train_keys if keys is None else keys
        found = self.train.at(self.sites[k], replace(keys, root=keys.root + shift))
        if found is None:
            return np.full((len(keys), 1), np.nan)
        return np.where(found.present[:, None], found.values, np.nan)

    def error(self, j: int, k: int) -> float:
        """Channel error of what the server fed as layer j against training's layer k."""
        x, y = self.served[j], self.trained[k]
        if x.shape != y.shape:
            return float("inf")
        return channel_error(x, y)

    @cached_property
    def matrix(self) -> Real:
        """`error` of every served layer (rows) against every trained one (columns)."""
        return np.array([[self.error(j, k) for k in range(len(self.sites))] for j in range(len(self.served))])

    @property
    def healthy(self) -> bool:
        """Whether every layer agrees within what is allowed."""
        if self.single or len(self.served) != len(self.sites):
            return False
        return all(self.matrix[k, k] <= self.allowed[site] for k, site in enumerate(self.sites))

    @cached_property
    def layers(self) -> Sampled | None:
        """Every layer of the target on 64 channels: rows (indices of `serve_keys`) [R], layers [M], values
        [R, M, C]; None if the train trace holds no such table.
        """
        return self._sampled("sample")

    @cached_property
    def branches(self) -> Sampled | None:
        """What the layer before each of them added last to the stream, as `layers`; None for an older trace."""
        return self._sampled("branch")

    def _sampled(self, column: str) -> Sampled | None:
        table = self.train.trace.table("layers")
        table = table.filter(pc.is_valid(table.column(column)))
        if not table.num_rows:
            return None
        table = table.filter(pc.is_in(table.column("prompt_id"), value_set=_array(self.train_keys.prompt_id)))
        layers = np.unique(table.column("layer").to_numpy()).astype(np.int64)
        prompt, root, layer = (table.column(n).to_numpy().astype(np.int64) for n in ("prompt_id", "root", "layer"))
        order = np.lexsort((layer, root, prompt))
        place: dict[tuple[int, int], int] = {}
        for start in range(0, len(order) - len(layers) + 1, len(layers)):
            at = order[start]
            place[int(prompt[at]), int(root[at])] = start
        flat = table.column(column).combine_chunks().flatten()
        samples = flat.to_numpy(zero_copy_only=False).reshape(table.num_rows, -1)
        wanted = list(zip(self.train_keys.prompt_id.tolist(), self.train_keys.root.tolist(), strict=True))
        rows = np.array([row for row, key in enumerate(wanted) if key in place], dtype=np.int64)
        if not rows.size:
            return None
        starts = np.array([place[wanted[row]] for row in rows], dtype=np.int64)
        values = samples[order[starts[:, None] + np.arange(len(layers))[None, :]]]
        return rows, layers, values

    def nearest(self, x: Real) -> tuple[int, float, dict[int, float]] | None:
        """The target layer nearest to features x [T, G] (rows of `serve_keys`): its number (Hugging Face
        `hidden_states[i]`; the number of layers + 1 stands for after the final norm), its error, and all.
        """
        return self._nearest(x, self.layers)

    def nearest_part(self, x: Real, *, branch: bool) -> tuple[int, float, dict[int, float]] | None:
        """The same among the parts that a layer's input is the sum of: what the layer before it added last, or the
        stream that was added to.
        """
        if self.layers is None or self.branches is None:
            return None
        if branch:
            return self._nearest(x, self.branches)
        (rows, all_layers, values), (_, layers, added) = self.layers, self.branches
        return self._nearest(x, (rows, layers, values[:, np.searchsorted(all_layers, layers)] - added))

    def _nearest(self, x: Real, among: Sampled | None) -> tuple[int, float, dict[int, float]] | None:
        if among is None:
            return None
        rows, layers, values = among
        channels = self.train.trace.layer_channels(x.shape[1])
        if len(channels) != values.shape[2] or channels.max(initial=0) >= x.shape[1]:
            return None
        mine = x[rows][:, channels]
        errors = {int(n): channel_error(mine, values[:, at]) for at, n in enumerate(layers)}
        best = min(errors, key=errors.__getitem__)
        return best, errors[best], errors


def _array(ids: NDArray[np.int32]) -> Any:
    import pyarrow as pa

    return pa.array(np.unique(ids), type=pa.int32())


def _allowed(diff: Diff, train: Trace, serve: Trace, sites: list[str]) -> dict[str, float]:
    """Channel error allowed at each feature: the diff's tolerance, else 4 times the measured floor, else the
    analytic one of 16 roundings a layer (`tolerance.py`).
    """
    known = {
        one.site: one.tolerance.allowed["channel_median"]
        for one in diff.sites
        if one.step == 0 and one.tolerance is not None and "channel_median" in one.tolerance.allowed
    }
    floors = {
        row["site"]: 4 * float(row["channel_median"])
        for row in train.table("floors").to_pylist()
        if row["step"] == 0 and row["dtype"] == serve.manifest.dtype
    }
    unit = max(UNIT.get(trace.manifest.dtype, UNIT["float32"]) for trace in (train, serve))
    layers = int(train.manifest.target.get("num_hidden_layers") or 32)
    fallback = 4 * ONE_ROUNDING * unit * (32.0 * layers) ** 0.5
    if shares_features(train, serve):
        fallback = 0.0
    return {site: known.get(site, max(floors.get(site, 0.0), fallback)) for site in sites}
