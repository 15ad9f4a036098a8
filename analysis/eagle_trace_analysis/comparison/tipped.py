"""Rows that the target's routers sent to other experts by rounding, and what is left of a comparison without them.

A router takes the k experts of the highest score. Where the k-th and the next score are nearer to each other than
rounding moves them, two right implementations choose differently, and the token's hidden state is another one from
that layer on: far beyond any tolerance, and nobody's fault. The train recorder measured both for every token
(routing.parquet): the gap, and by the reference dtype what rounding does to it.

With noise n of a gap g between the dtype and its reference, two implementations in that dtype are sqrt(2) n apart, so
they choose differently with probability 1/2 erfc(g / 2n). A gap above 4 n tips once in 400 tips and is taken for clear.

**A row is taken for tipped** only if the reference's own figures say that it may have been: it differs from one feature
on, a router between that one and the feature before had a gap within 4 n for it, and what was served is still the row's
own (`own.py`). Its keys and values enter the rows behind it in the layers above the tipped one, so features of those
may differ too, two layers above it and higher. The comparison is judged anew without these rows: whatever else is
wrong shows on the others. Nothing is excused where

- a row with clear gaps differs, and is not behind one that tipped: a router that scores otherwise, and any other
  fault, moves those as well;
- more rows differ than rounding tips, were it twice what was measured;
- the rest still differs; or a layer chooses its experts in a way that the recorder does not read.

Agreement has to be shown on what is left, and a fault of the draft may show only on what is not: in draft steps, behind
a verify round, far from the beginning. So where too few rows of any of these would be left (`_thin`), the features stay
diverged, and the cause says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, lgamma, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace.sites import Site
from eagle_trace_analysis.comparison.left import SKIPPED
from eagle_trace_analysis.comparison.margins import Margins, Row
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.own import keeps_values, not_its_own
from eagle_trace_analysis.comparison.result import SiteResult
from eagle_trace_analysis.comparison.tolerance import UNIT, sources
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Node = tuple[str, int]
Results = dict[Node, SiteResult]

#: how much more than the reference the other side may round
COARSER = 2.0
#: a number of rows that rounding tips less often than this is not of its making
IMPLAUSIBLE = 1e-4
#: largest share of the rows of one kind that may be left out of what is said to agree, and of those furthest from the
#: beginning, where a fault that grows with the position shows
MOST_LEFT_OUT, MOST_OF_FURTHEST = 0.25, 0.5
_FEATURE = "target.hidden."


@dataclass(frozen=True)
class Tipped:
    """What the margins say of features that differ.

    Attributes:
        verdict: ``excused`` (left out, and what is left decides), ``many`` (they explain the features, but too few rows
            would be left to say that the rest agrees), ``other`` (they do not explain them), ``unread`` (not all
            routers were read, not in this precision, or the values of the features were not kept).
        site: the first feature that differs.
        tipped: rows that went to other experts, with the layer and gap / noise.
        behind: rows behind them, which attend to them above that layer.
        rows: rows of the features that were compared.
        expected: how many of them rounding tips.
        why: for all but ``excused``, in words.
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
    def moved(self) -> frozenset[Row]:
        """Rows whose features other experts moved."""
        return frozenset(self.tipped) | self.behind

    @property
    def left_out(self) -> frozenset[Row]:
        """Rows whose features are not compared; none unless they are excused."""
        return self.moved if self.verdict == "excused" else frozenset()

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
        since: the layer of the feature below, 0 for the lowest.
        error: of each row.
        moved: an error from here on is more than half of healthy rows could have.
        allowed: largest error of a healthy row.
    """

    site: str
    layer: int
    since: int
    error: Mapping[Row, float]
    moved: float
    allowed: float


#: compares sites again, by the pairs given
Judge = Callable[[Mapping[str, Pairs]], Results]


def beside_tipped(
    traces: tuple[Trace, Trace],
    sites: Sequence[Site],
    dtype: str,
    results: Results,
    errors: Callable[[str], tuple[Pairs, Float64]],
    judge: Judge,
) -> tuple[Results, Tipped | None]:
    """`results` judged anew without rows that rounding sent to other experts, if those explain how features differ.

    Args:
        traces: the reference, and what is held against it.
        sites: of the pair, in forward order.
        dtype: the lower precision of the two sides.
        results: of all sites.
        errors: pairs of a site, and the error of each.
        judge: compares sites again.

    Returns:
        The results, and what the margins say; None where features agree or no margins were measured.
    """
    train = traces[0]
    margins = Margins.read(train) if any(map(_by_values, results.values())) else None
    if margins is None:
        return results, None
    flow = _Flow(sites)
    wrong = [one for node, one in results.items() if one.divergence is not None and flow.reaches(node, _FEATURE)]
    given = [one for one in wrong if one.site.startswith(_FEATURE)]
    features = _features(margins, results, errors)
    if not features or not any(map(_by_values, wrong)) or not all(map(_by_values, given)):
        return results, None
    site, step = (given or wrong)[0].site, (given or wrong)[0].step
    if (why := _unknown(traces, dtype, margins, features)) is not None:
        return results, Tipped("unread", site, why=why) if given else None
    found = replace(_explained(margins, features, site), dtype=train.manifest.dtype)
    if not given and (not found.tipped or flow.reaches((site, step), ".attn.context")):
        # rows that tip may be within a floor in which they tipped as well, while what is made of them is not
        return results, None
    if found.verdict == "excused" and (why := _foreign(traces, features, found, lambda site: errors(site)[0])):
        found = replace(found, verdict="other", why=why)
    if found.verdict != "excused":
        return results, found
    judged, thin = _judged_anew(flow, results, found.moved, lambda site: errors(site)[0], judge)
    apart = [one for one in judged.values() if one.divergence is not None]
    left = next((one for one in apart if one.site.startswith(_FEATURE)), None)
    if left is not None and left.divergence is not None:
        why = f"without the {len(found.moved)} rows that may have tipped, {left.site} still differs"
        return results, replace(found, verdict="other", why=f"{why} ({left.divergence.why})")
    if thin is not None and not apart:
        return results, replace(found, verdict="many", why=thin)
    return results | judged, found


def _unknown(traces: tuple[Trace, Trace], dtype: str, margins: Margins, features: Sequence[_Feature]) -> str | None:
    """Why nothing can be said of rows that differ, in words; None if something can."""
    own, last = traces[0].manifest.dtype, max(one.layer for one in features)
    if UNIT.get(dtype, 1.0) > UNIT.get(own, 1.0):
        return f"the margins of the target's routers were measured in {own}, and one side computes in {dtype}"
    if unread := [layer for layer in margins.unread if layer < last]:
        return f"layers {unread} choose experts in a way that the recorder does not read"
    if not keeps_values(*traces, [one.site for one in features]):
        return "without the values of the features nothing tells a row of other experts from one that is not its own"
    return None


def _foreign(
    traces: tuple[Trace, Trace], features: Sequence[_Feature], found: Tipped, pairs_of: Callable[[str], Pairs]
) -> str | None:
    """Why a row that may have tipped, or is behind one, is not what other experts made of it; None if all may be."""
    moved = {
        one.site: [row for row, error in one.error.items() if error > one.moved and row in found.moved]
        for one in features
    }
    return not_its_own(*traces, pairs_of, moved)


def _by_values(one: SiteResult) -> bool:
    """Whether a site diverged by numbers that are all finite."""
    if one.divergence is None or one.divergence.kind != "values" or not isinstance(one.metrics, Metrics):
        return False
    return not (one.metrics.nonfinite_train or one.metrics.nonfinite_serve)


def _features(margins: Margins, results: Results, errors: Callable[[str], tuple[Pairs, Float64]]) -> list[_Feature]:
    found: list[_Feature] = []
    for layer, number in sorted((layer, number) for number, layer in enumerate(margins.layer_ids)):
        one = results.get((f"{_FEATURE}{number}", 0))
        if one is None or one.tolerance is None:
            continue
        pairs, error = errors(one.site)
        keys = pairs.train_keys.take(pairs.train)
        by_row = dict(zip(zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True), error.tolist(), strict=True))
        allowed = one.tolerance.allowed
        since = found[-1].layer if found else 0
        found.append(_Feature(one.site, layer, since, by_row, allowed["rho_median"], allowed["rho_max"]))
    return found


def _explained(margins: Margins, features: Sequence[_Feature], site: str) -> Tipped:
    """Whether every row that differs may have tipped, or is behind one that may."""
    last = features[-1].layer
    rows = {row for one in features for row in one.error}
    tipped, started = _near_others(margins, features)
    before: dict[int, list[tuple[int, int]]] = {}
    for (prompt, root), (layer, _) in started.items():
        before.setdefault(prompt, []).append((root, layer))
    behind: set[Row] = set()
    for one in features:
        for row, error in one.error.items():
            if error <= one.moved or (row in started and started[row][1] <= one.layer):
                continue
            if any(root < row[1] and layer + 2 <= one.layer for root, layer in before.get(row[0], ())):
                behind.add(row)
            elif error > one.allowed:
                why = _clear(margins, one, row, error)
                return Tipped("other", site, tipped, frozenset(behind), len(rows), why=why)
    expected = margins.expected(rows, last)
    found = Tipped("excused", site, tipped, frozenset(behind - set(tipped)), len(rows), expected)
    if not tipped:
        return replace(found, verdict="other", why="no row that differs came near to other experts")
    if _at_least(len(tipped), COARSER * expected) < IMPLAUSIBLE:
        why = f"{len(tipped)} rows differ that may have tipped, where rounding tips about {expected:.1f}"
        return replace(found, verdict="other", why=why)
    return found


def _near_others(
    margins: Margins, features: Sequence[_Feature]
) -> tuple[dict[Row, tuple[int, float]], dict[Row, tuple[int, int]]]:
    """Rows that differ from one feature on, and may have tipped between that one and the feature below: a row that did
    so below that differs there, too.

    Returns:
        Of each row its narrowest cut there; and the lowest layer at which it may have tipped, with the layer of the
        feature that shows it first.
    """
    tipped: dict[Row, tuple[int, float]] = {}
    started: dict[Row, tuple[int, int]] = {}
    for one in features:
        for row, error in one.error.items():
            if error <= one.moved or row in tipped:
                continue
            layer = margins.tipping(row, one.since, one.layer)
            narrow = margins.narrowest(row, one.since, one.layer)
            if layer is not None and narrow is not None:
                tipped[row], started[row] = narrow, (layer, one.layer)
    return tipped, started


def _clear(margins: Margins, feature: _Feature, row: Row, error: float) -> str:
    """That a row differs at a feature though its scores were clear, in words."""
    narrow = margins.narrowest(row, feature.since, feature.layer)
    which = f"from layer {feature.since} on" if feature.since else "below"
    margin = f"no router {which} had two scores that are near to each other"
    if narrow is not None:
        margin = f"the nearest scores of a router {which} are {narrow[1]:.1f} times as far apart as rounding "
        margin += f"moves them (layer {narrow[0]})"
    return f"root {row[1]} of prompt {row[0]} differs at {feature.site} by {error:.2g}, and {margin}"


def _at_least(count: int, mean: float) -> float:
    """Probability that a Poisson number of a mean is `count` or more."""
    if mean <= 0:
        return 0.0 if count else 1.0
    return max(0.0, 1.0 - sum(exp(n * log(mean) - mean - lgamma(n + 1)) for n in range(count)))


def _judged_anew(
    flow: _Flow, results: Results, rows: frozenset[Row], pairs_of: Callable[[str], Pairs], judge: Judge
) -> tuple[Results, str | None]:
    """Every site that diverged and is computed from the features, without what follows from rows that tipped.

    What attention has touched follows from all rows before it, so there a tipped row takes those behind it along, if
    it is not enough to leave it out itself.

    Returns:
        The results, and of which of those that agree too little is left, in words; None if of none.
    """
    open_ = {node for node, one in results.items() if _by_values(one) and flow.reaches(node, _FEATURE)}
    first = {p: min(r for q, r in rows if q == p) for p, _ in rows}
    judged: Results = {}
    thin: dict[Node, str | None] = {}
    for behind in (False, True):
        again = {node for node in open_ if not behind or flow.reaches(node, ".attn.context")}
        pairs = {site: pairs_of(site) for site in {site for site, _ in again}}
        dropped = {site: _dropped(one, rows, first if behind else {}) for site, one in pairs.items()}
        left = {site: one.without(dropped[site], SKIPPED) for site, one in pairs.items()}
        new = {node: one for node, one in judge(left).items() if node in again}
        judged |= new
        thin |= {node: _thin(node, pairs[node[0]], dropped[node[0]]) for node in new}
        open_ = {node for node in again if node in new and new[node].divergence is not None}
    in_order = {node: judged[node] for node in results if node in judged}
    return in_order, next((why for node in in_order if (why := thin[node]) is not None), None)


def _thin(node: Node, pairs: Pairs, dropped: Bool) -> str | None:
    """Of which rows of a site and step too few would be left to say that they agree, in words; None if of none.

    Rows of prefills and those behind a verify round are counted apart, since faults of a server's cache show on the
    latter alone, and so is the quarter of each that is furthest from the beginning of its prompt.
    """
    site, step = node
    keys, serve = pairs.train_keys.take(pairs.train), pairs.serve_keys.take(pairs.serve)
    for which, kind in ((serve.round == 0, "of prefills "), (serve.round != 0, "behind a verify round ")):
        here = np.flatnonzero((keys.step == step) & which)
        furthest = here[np.argsort(keys.root[here], kind="stable")][-(-3 * len(here) // 4) :]
        for among, most, words in (
            (here, MOST_LEFT_OUT, kind),
            (furthest, MOST_OF_FURTHEST, f"{kind}that are furthest from the beginning "),
        ):
            gone = int(dropped[among].sum())
            if gone > most * len(among):
                words = words if step == 0 else words.removeprefix(kind)
                return f"of {len(among)} rows {words}{len(among) - gone} would be left ({site}, step {step})"
    return None


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
