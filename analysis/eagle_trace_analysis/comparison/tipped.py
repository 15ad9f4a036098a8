"""Rows that the target's routers sent to other experts by rounding, and what is left of a comparison without them.

A router takes the k experts of the highest score. Where the k-th and the next score are nearer to each other than
rounding moves them, two right implementations choose differently, and the token's hidden state is another one from
that layer on: far beyond any tolerance, and nobody's fault. The train recorder measured both for every token
(routing.parquet): the gap, and by the reference dtype what rounding does to it.

With noise n of a gap g between the dtype and its reference, two implementations in that dtype are sqrt(2) n apart, so
they choose differently with probability 1/2 erfc(g / 2n). A gap above 4 n tips once in 400 tips and is taken for clear.

**A row is excused** only if the reference's own figures say that it may have tipped: its features differ, and a router
below had a gap within 4 n for it. Its keys and values enter the rows behind it in the layers above the tipped one, so
features of those may differ too, two layers above it and higher. The rows are left out, and the comparison is judged
anew without them: whatever else is wrong shows on the others. Nothing is excused where

- a row with clear gaps differs, and is not behind one that tipped: a router that scores otherwise, and any other
  fault, moves those as well;
- more rows differ than rounding tips, were it twice what was measured;
- the rest still differs; or a layer chooses its experts in a way that the recorder does not read.

Where more than half of the rows would be left out, the features stay diverged, and the cause says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import erfc, exp, lgamma, log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace.sites import Site
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import SiteResult
from eagle_trace_analysis.comparison.tolerance import UNIT, sources
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Node = tuple[str, int]
Results = dict[Node, SiteResult]
#: a row of the features: prompt_id of training, root
Row = tuple[int, int]

#: gaps up to this many times their noise may tip
TIPS = 4.0
#: how much more than the reference the other side may round
COARSER = 2.0
#: a number of rows that rounding tips less often than this is not of its making
IMPLAUSIBLE = 1e-4
#: largest share of the rows that may be left out of features that are said to agree
MOST_LEFT_OUT = 0.5
_FEATURE = "target.hidden."
SKIPPED = "router-tipped"


@dataclass(frozen=True)
class Margins:
    """What the routers of a train trace's target came near to.

    Attributes:
        cuts: of each row its cuts that are narrow, and its narrowest: (layer, gap / noise).
        unread: layers that choose experts in a way the recorder does not read.
        layer_ids: of the features, in their order: i is the input of decoder layer i.
    """

    cuts: Mapping[Row, Sequence[tuple[int, float]]]
    unread: tuple[int, ...]
    layer_ids: tuple[int, ...]

    @classmethod
    def read(cls, train: Trace) -> Margins | None:
        """Those of a trace; None if it measured none, or has no layer with experts below its features."""
        said, ids = train.manifest.settings.get("routers"), _numbers(train.manifest.draft.get("layer_ids"))
        unread = _numbers(said.get("unread")) if isinstance(said, Mapping) else ()
        if not isinstance(said, Mapping) or not ids or not (said.get("read") or unread):
            return None
        table = train.table("routing")
        prompt, root, layer, gap, noise = (
            table.column(name).to_pylist() for name in ("prompt_id", "root", "layer", "gap", "noise")
        )
        cuts: dict[Row, list[tuple[int, float]]] = {}
        for p, r, n, g, s in zip(prompt, root, layer, gap, noise, strict=True):
            cuts.setdefault((p, r), []).append((n, g / s if s > 0 else float("inf")))
        return cls(cuts, unread, ids)

    def tipping(self, row: Row, below: int) -> int | None:
        """The lowest layer below `below` at which a row may have tipped."""
        return min((n for n, ratio in self.cuts.get(row, ()) if n < below and ratio <= TIPS), default=None)

    def narrowest(self, row: Row, below: int) -> tuple[int, float] | None:
        """The narrowest cut of a row below a layer that was kept: its layer, and gap / noise."""
        return min((one for one in self.cuts.get(row, ()) if one[0] < below), key=lambda one: one[1], default=None)

    def expected(self, rows: Iterable[Row], below: int) -> float:
        """How many of `rows` rounding tips below a layer, two implementations rounding alike."""
        return sum(0.5 * erfc(ratio / 2) for row in rows for n, ratio in self.cuts.get(row, ()) if n < below)


@dataclass(frozen=True)
class Tipped:
    """What the margins say of features that differ.

    Attributes:
        verdict: ``excused`` (left out, and what is left agrees), ``many`` (they explain the features, but too few rows
            would be left), ``other`` (they do not explain them), ``unread`` (not all routers were read, or not in this
            precision).
        site: the first feature that differs.
        tipped: rows that went to other experts, with the layer and gap / noise.
        behind: rows behind them, which attend to them above that layer.
        rows: rows of the features that were compared.
        expected: how many of them rounding tips.
        why: for ``other`` and ``unread``, in words.
        dtype: what both sides computed in.
    """

    verdict: Literal["excused", "many", "other", "unread"]
    site: str
    tipped: Mapping[Row, tuple[int, float]] = field(default_factory=dict)
    behind: frozenset[Row] = frozenset()
    rows: int = 0
    expected: float = 0.0
    why: str = ""
    dtype: str = ""

    @cached_property
    def left_out(self) -> frozenset[Row]:
        """Rows whose features are not compared; none unless they are excused."""
        return frozenset(self.tipped) | self.behind if self.verdict == "excused" else frozenset()

    def among(self, keys: Rows) -> Bool:
        """Which rows [T] are left out."""
        rows = zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True)
        return np.fromiter((row in self.left_out for row in rows), np.bool_, len(keys))

    @property
    def text(self) -> str:
        """The rows and their margins, in one sentence."""
        (_, root), (layer, ratio) = min(self.tipped.items(), key=lambda one: one[1][1])
        widest = max(ratio for _, ratio in self.tipped.values())
        behind = f", and {len(self.behind)} behind them attend to one" if self.behind else ""
        return (
            f"the target sent {len(self.tipped)} of {self.rows} rows to other experts{behind}: two scores of a router "
            f"were {ratio:.1f} to {widest:.1f} times as far apart as rounding in {self.dtype} moves them (nearest: "
            f"root {root}, layer {layer}), and rounding tips about {self.expected:.0f} of these rows"
        )


@dataclass(frozen=True)
class _Feature:
    """One of the features, row by row.

    Attributes:
        site, layer: its name, and the decoder layer whose input it is.
        error: of each row.
        moved: an error from here on is more than half of healthy rows could have.
        allowed: largest error of a healthy row.
    """

    site: str
    layer: int
    error: Mapping[Row, float]
    moved: float
    allowed: float


#: compares sites again, by the pairs given
Judge = Callable[[Mapping[str, Pairs]], Results]


def beside_tipped(
    train: Trace,
    sites: Sequence[Site],
    dtype: str,
    results: Results,
    errors: Callable[[str], tuple[Pairs, Float64]],
    judge: Judge,
) -> tuple[Results, Tipped | None]:
    """`results` judged anew without rows that rounding sent to other experts, if those explain how features differ.

    Args:
        train: the reference.
        sites: of the pair, in forward order.
        dtype: the lower precision of the two sides.
        results: of all sites.
        errors: pairs of a site, and the error of each.
        judge: compares sites again.

    Returns:
        The results, and what the margins say; None where features agree or no margins were measured.
    """
    margins = Margins.read(train) if any(map(_by_values, results.values())) else None
    if margins is None:
        return results, None
    flow = _Flow(sites)
    wrong = [one for node, one in results.items() if one.divergence is not None and flow.reaches(node, _FEATURE)]
    given = [one for one in wrong if one.site.startswith(_FEATURE)]
    features = _features(margins, results, errors)
    if not features or not any(map(_by_values, wrong)) or not all(map(_by_values, given)):
        return results, None
    own, site = train.manifest.dtype, (given or wrong)[0].site
    if UNIT.get(dtype, 1.0) > UNIT.get(own, 1.0):
        why = f"the margins of the target's routers were measured in {own}, and one side computes in {dtype}"
        return results, Tipped("unread", site, why=why) if given else None
    found = _explained(margins, features, site)
    if not given and not found.tipped:
        # rows that tip may be within a floor in which they tipped as well, while what is made of them is not
        return results, None
    found = replace(found, dtype=own)
    if found.verdict != "excused":
        return results, found
    judged = _judged_anew(flow, results, found, lambda site: errors(site)[0], judge)
    left = next((one for one in judged.values() if one.site.startswith(_FEATURE) and one.divergence is not None), None)
    if left is not None and left.divergence is not None:
        why = f"without the {len(found.left_out)} rows that may have tipped, {left.site} still differs"
        return results, replace(found, verdict="other", why=f"{why} ({left.divergence.why})")
    return results | judged, found


def _numbers(value: Any) -> tuple[int, ...]:
    """A list of a manifest that should hold whole numbers; none if it is something else."""
    found = tuple(value) if isinstance(value, list) else ()
    return found if all(isinstance(one, int) for one in found) else ()


def left_out(results: Iterable[SiteResult]) -> str:
    """How many rows follow from those that tipped, and are not compared, in words."""
    counts = [
        (skipped, one.site, one.step, one.coverage.matched + skipped)
        for one in results
        if one.coverage is not None and (skipped := one.coverage.skipped_train.get(SKIPPED, 0))
    ]
    most, site, step, rows = max(counts)
    return f"what follows from them is not compared, at most {most} of {rows} rows ({site}, step {step})"


def _by_values(one: SiteResult) -> bool:
    """Whether a site diverged by numbers that are all finite."""
    if one.divergence is None or one.divergence.kind != "values" or not isinstance(one.metrics, Metrics):
        return False
    return not (one.metrics.nonfinite_train or one.metrics.nonfinite_serve)


def _features(margins: Margins, results: Results, errors: Callable[[str], tuple[Pairs, Float64]]) -> list[_Feature]:
    found = []
    for number, layer in enumerate(margins.layer_ids):
        one = results.get((f"{_FEATURE}{number}", 0))
        if one is None or one.tolerance is None:
            continue
        pairs, error = errors(one.site)
        keys = pairs.train_keys.take(pairs.train)
        by_row = dict(zip(zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True), error.tolist(), strict=True))
        allowed = one.tolerance.allowed
        found.append(_Feature(one.site, layer, by_row, allowed["rho_median"], allowed["rho_max"]))
    return found


def _explained(margins: Margins, features: Sequence[_Feature], site: str) -> Tipped:
    """Whether every row that differs tipped, or is behind one that did."""
    last = max(one.layer for one in features)
    if unread := [layer for layer in margins.unread if layer < last]:
        return Tipped("unread", site, why=f"layers {unread} choose experts in a way that the recorder does not read")
    rows = {row for one in features for row in one.error}
    tipped: dict[Row, tuple[int, float]] = {}
    started: dict[Row, int] = {}
    for one in features:
        for row, error in one.error.items():
            if error > one.moved and (layer := margins.tipping(row, one.layer)) is not None:
                started[row] = min(layer, started.get(row, layer))
                narrow = margins.narrowest(row, one.layer)
                if narrow is not None:
                    tipped.setdefault(row, narrow)
    before: dict[int, list[tuple[int, int]]] = {}
    for (prompt, root), layer in started.items():
        before.setdefault(prompt, []).append((root, layer))
    behind: set[Row] = set()
    for one in features:
        for row, error in one.error.items():
            if error <= one.moved or margins.tipping(row, one.layer) is not None:
                continue
            if any(root < row[1] and layer + 2 <= one.layer for root, layer in before.get(row[0], ())):
                behind.add(row)
            elif error > one.allowed:
                narrow = margins.narrowest(row, one.layer)
                margin = "no router below had two scores that are near to each other"
                if narrow is not None:
                    margin = f"the nearest scores of a router below are {narrow[1]:.1f} times as far apart as rounding "
                    margin += f"moves them (layer {narrow[0]})"
                why = f"root {row[1]} of prompt {row[0]} differs at {one.site} by {error:.2g}, and {margin}"
                return Tipped("other", site, tipped, frozenset(behind), len(rows), why=why)
    expected = margins.expected(rows, last)
    found = Tipped("excused", site, tipped, frozenset(behind - set(tipped)), len(rows), expected)
    if not tipped:
        return replace(found, verdict="other", why="no row that differs came near to other experts")
    if _at_least(len(tipped), COARSER * expected) < IMPLAUSIBLE:
        why = f"{len(tipped)} rows differ that may have tipped, where rounding tips about {expected:.1f}"
        return replace(found, verdict="other", why=why)
    return replace(found, verdict="many") if len(found.left_out) > MOST_LEFT_OUT * len(rows) else found


def _at_least(count: int, mean: float) -> float:
    """Probability that a Poisson number of a mean is `count` or more."""
    if mean <= 0:
        return 0.0 if count else 1.0
    return max(0.0, 1.0 - sum(exp(n * log(mean) - mean - lgamma(n + 1)) for n in range(count)))


def _judged_anew(
    flow: _Flow, results: Results, found: Tipped, pairs_of: Callable[[str], Pairs], judge: Judge
) -> Results:
    """Every site that diverged and is computed from the features, without what follows from rows that tipped.

    What attention has touched follows from all rows before it, so there a tipped row takes those behind it along, if
    it is not enough to leave it out itself.
    """
    open_ = {node for node, one in results.items() if _by_values(one) and flow.reaches(node, _FEATURE)}
    first = {p: min(r for q, r in found.left_out if q == p) for p, _ in found.left_out}
    judged: Results = {}
    for behind in (False, True):
        again = {node for node in open_ if not behind or flow.reaches(node, ".attn.context")}
        pairs = {site: pairs_of(site) for site in {site for site, _ in again}}
        left = {
            site: one.without(_dropped(one, found.left_out, first if behind else {}), SKIPPED)
            for site, one in pairs.items()
        }
        new = {node: one for node, one in judge(left).items() if node in again}
        judged |= new
        open_ = {node for node in again if node in new and new[node].divergence is not None}
    return judged


def _dropped(pairs: Pairs, rows: frozenset[Row], first: Mapping[int, int]) -> Bool:
    keys = pairs.train_keys.take(pairs.train)
    return np.array(
        [
            (prompt, root) in rows or root >= first.get(prompt, root + 1)
            for prompt, root in zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )


class _Flow:
    """What sites are computed from."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = {site.name: site for site in sites}
        self._known: dict[tuple[Node, str], bool] = {}

    def reaches(self, node: Node, words: str) -> bool:
        """Whether a site is, or is computed from, one whose name holds `words`."""
        if (node, words) not in self._known:
            found = words in node[0] or any(self.reaches(one, words) for one in sources(self._sites, *node))
            self._known[node, words] = found
        return self._known[node, words]
