"""Keys and values kept in a coarser dtype than they are computed in: an option of the server's, at an expected cost.

"Nothing to do" is said of the draft where its attention is recomputed over rounded keys and values, and of the target,
whose attention is not recorded, where three things hold:

- the draft's own cache of the same dtype shows the rounding, or cannot be judged;
- rows of prefills that attend to nothing cached differ clearly less than the others, where the server takes the keys
  of a running forward from memory; and wherever the draft's cache cannot be judged, as nothing else speaks for it then;
- every feature differs by no more than the rounding can do (`_expected`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.cached import Kept, kept
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.comparison.tolerance import ONE_ROUNDING, UNKNOWN_TARGET_LAYERS
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import CLEARLY
from eagle_trace_analysis.evidence.layers import target_layers
from eagle_trace_analysis.replay.cached import unrounded, worst_attention
from eagle_trace_analysis.replay.replay import Replay

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
#: the reference's cache and the other side's
Pair = tuple[Kept, Kept]
SIDES = ("training", "serving")
#: how many times what is expected of the rounding the median and the worst of the rows that read the cache may be off:
#: 1.1 and 2.7 on a server that keeps bfloat16 and computes in float32, where prefills read nothing cached; 1.7 and 4.8
#: in the features of the same small target if every key and value is rounded, to bfloat16 or to 8 bits
MEDIAN, WORST = 2.0, 5.0
#: what a confirmed cause about the draft's inputs speaks of
GIVEN = ("target.hidden.", "fused", "token", "position", "embed")


@dataclass(frozen=True)
class _Found:
    """What of one model's cache is seen.

    Attributes:
        words: with figures.
        sites: where the two sides differ, in forward order.
        shown: they differ there by the rounding, proved or plausible; None if that could not be looked at.
        fresh: the rows of a forward take one another's keys from memory; None where that is not known.
    """

    words: str
    sites: tuple[str, ...] = ()
    shown: bool | None = False
    fresh: bool | None = None


def check(context: Context) -> Outcome:
    """Caches that round otherwise, and errors of the size of that rounding where attention reads them."""
    caches: dict[str, Pair] = {}
    for whose in ("target", "draft"):
        one, two = (kept(trace, draft=whose == "draft") for trace in (context.train, context.serve))
        if one is None or two is None:
            side = SIDES[one is not None]
            why = f"the {side} side does not say in which dtype it keeps keys and values"
            return not_tested(why, f"record the {side} side with this version")
        caches[whose] = one, two
    unlike = {whose: pair for whose, pair in caches.items() if _unlike(pair)}
    if not unlike:
        one, two = caches["target"]
        return ruled_out(f"keys and values are kept in {two.dtype}" + (" on both sides" if one == two else ""))
    said = _settings(context, unlike)
    unknown = next((one.dtype for pair in unlike.values() for one in pair if not one.known), None)
    if unknown is not None:
        return not_tested(f"{said}; what {unknown} makes of a number is not known here", "serve with another cache")
    found: dict[str, _Found] = {}
    draft = _of_draft(context, unlike["draft"]) if "draft" in unlike else None
    if "target" in unlike:
        found["target"] = _of_target(context, unlike["target"], draft if caches["draft"] == caches["target"] else None)
    if draft is not None:
        found["draft"] = draft
    evidence = f"{said}; {'; '.join(one.words for one in found.values())}"
    rounding = [side for at, side in enumerate(SIDES) if any(pair[at].rounds for pair in unlike.values())]
    without = f"record {' and '.join(f'the {side} side' for side in rounding)} with --kv-cache-dtype auto"
    target = found.get("target")
    # what may be more than rounding at the target is for others to explain, and all behind it with it
    if target is not None and target.sites and not target.shown:
        more = f"{without}: what then still differs is not the cache's doing"
        return ruled_out(evidence) if target.shown is False else not_tested(evidence, more)
    sites = tuple(site for one in found.values() if one.shown for site in one.sites)
    if not sites:
        unseen = any(one.sites and one.shown is None for one in found.values())
        return not_tested(evidence, RECORD_VALUES) if unseen else ruled_out(evidence)
    fix = (
        "nothing, if the option is meant: it rounds by design, and its cost is what the accept lengths show; to "
        f"compare without it, {without}"
    )
    return replace(confirmed(evidence + _lengths(context), fix, sites[0]), explains=frozenset(sites))


def _unlike(pair: Pair) -> bool:
    """Whether the two caches make other numbers of what is kept in them."""
    one, two = pair
    exact = [side.known and not side.rounds for side in pair]
    return not all(exact) and one.name != two.name


def _settings(context: Context, unlike: Mapping[str, Pair]) -> str:
    """What the two sides are set to, in words."""
    pairs = list(unlike.values())
    if len(pairs) == 2 and pairs[0] != pairs[1]:
        return "; ".join(_settings(context, {whose: pair}) for whose, pair in unlike.items())
    whose = "" if len(pairs) == 2 else f" of the {next(iter(unlike))}"
    one, two = pairs[0]
    theirs = f"training in {one.words()}" if context.train.side == "serve" else "training caches none"
    return f"by option, serving keeps keys and values{whose} in {two.words()}, {theirs}"


# ---- the target's ----------------------------------------------------------------------------------------------------


def _of_target(context: Context, pair: Pair, draft: _Found | None) -> _Found:
    """Features that differ by no more than the rounding may do; the target's own attention was not recorded.

    Args:
        context: the pair of traces.
        pair: the two caches.
        draft: what is seen of the draft's caches; None if they are not of the same dtypes.
    """
    kinds = {site: found.kind for site in context.feature_sites if (found := context.divergence(site)) is not None}
    sites = tuple(kinds)
    if not sites:
        return _Found("the target's features agree")
    for name, outcome in context.outcomes.items():
        if outcome.verdict == "confirmed" and (outcome.site or "").startswith(GIVEN):
            return _Found(f"that the target's features differ is explained by {name}")
    if (other := next((site for site, kind in kinds.items() if kind != "values"), None)) is not None:
        return _Found(f"{other} differs in another way than in its values", sites)
    said = f"the features differ from {sites[0]} on"
    if context.train.level != "values" or context.serve.level != "values":
        return _Found(f"{said}, and which of their rows do was not recorded", sites, shown=None)
    seen = [_Rows.of(context, site, pair) for site in sites]
    worst = max(seen, key=lambda one: one.ratio)
    words = f"{said}, {worst.words()}"
    if worst.ratio > 1:
        return _Found(f"{words}: that is not all", sites)
    judged = draft is not None and draft.shown is not None
    if draft is not None and draft.shown is False:
        return _Found(f"{words}, but the draft's cache does not show it", sites, shown=None)
    if not judged:
        words += "; the draft's cache cannot be judged beside it"
    apart = [one.apart for one in seen]
    # a server that reads also the keys of a running forward from the cache has no rows to tell apart
    if draft is not None and draft.fresh is False:
        apart = [None for _ in seen]
    if False in apart:
        words += ", and rows that read nothing from the cache differ as well"
        return _Found(words, sites, shown=False if judged else None)
    if None in apart:
        words += "; no row is known to read nothing from the cache"
        if not judged:
            return _Found(words, sites, shown=None)
    return _Found(f"{words} (plausible, not proved: the target's own attention is not recorded)", sites, shown=True)


@dataclass(frozen=True)
class _Rows:
    """Errors of one feature's rows, and what the rounding is expected to do to it.

    Attributes:
        site: the feature.
        fresh: errors of the rows that read nothing from a cache that rounds, if running forwards read from memory.
        behind: errors of all other rows.
        worst: the largest error.
        expected: by `_expected`.
        layers: of the target below the feature.
        allowed: errors up to here are within the tolerance of a row.
    """

    site: str
    fresh: Float64
    behind: Float64
    worst: float
    expected: float
    layers: int
    allowed: float

    @classmethod
    def of(cls, context: Context, site: str, pair: Pair) -> _Rows:
        """Those of one feature."""
        pairs, error = RowFigures.of(context.diff, context.train, context.serve).errors(site)
        clean = np.ones(len(error), dtype=np.bool_)
        sides = (pairs.train_keys.take(pairs.train), pairs.serve_keys.take(pairs.serve))
        for keys, cache in zip(sides, pair, strict=True):
            if cache.rounds:
                clean &= _reads_nothing(keys)
        known = ~np.isnan(error)
        results = context.results(site)
        worst = max((one.metrics.rho_max for one in results if isinstance(one.metrics, Metrics)), default=float("nan"))
        limits = [one.tolerance.allowed["rho_max"] for one in results if one.tolerance is not None]
        layers = target_layers(context) or UNKNOWN_TARGET_LAYERS
        at, ids = context.feature_sites.index(site), context.trained_ids or []
        below = min(ids[at], layers) if at < len(ids) else layers
        expected = _expected(max(one.unit for one in pair if one.rounds), below)
        return cls(site, error[known & clean], error[known & ~clean], worst, expected, below, min(limits, default=0.0))

    @property
    def median(self) -> float:
        """Of the rows that read the cache; of all where there is none."""
        return float(np.median(self.behind if self.behind.size else self.fresh))

    @property
    def ratio(self) -> float:
        """How many times what the rounding may do the rows are off; above 1 it is not the rounding alone."""
        if not (self.fresh.size or self.behind.size) or not self.expected or not np.isfinite(self.worst):
            return float("inf")
        return max(self.median / MEDIAN, self.worst / WORST) / self.expected

    @property
    def apart(self) -> bool | None:
        """Whether rows that read nothing from the cache differ clearly less; None if there are none of them."""
        if not self.fresh.size:
            return None
        clearly = CLEARLY * float(np.median(self.behind)) if self.behind.size else 0.0
        return bool(self.fresh.max() <= max(self.allowed, clearly))

    def words(self) -> str:
        """With figures."""
        parts = [
            f"{errors.max():.1e} at most in {errors.size} {which}"
            for errors, which in ((self.fresh, "rows that read nothing cached"), (self.behind, "others"))
            if errors.size
        ]
        middle = f", half of them above {self.median:.1e}" if self.behind.size else ""
        return (
            f"{self.site} by {self.worst:.1e} in the worst row ({', '.join(parts)}{middle}), where rounding the keys "
            f"and values of {self.layers} layers does {self.expected:.1e}, and {MEDIAN * self.expected:.1e} (median) "
            f"and {WORST * self.expected:.1e} (worst row) at most"
        )


def _expected(unit: float, layers: int) -> float:
    """Relative error that a cache of a rounding `unit` makes in the stream behind a number of layers.

    A rounded number is off by r = 0.425 unit (`tolerance.py`). Attention sums values with weights that add to 1, and
    their errors with the same: r at most, and less where many keys are averaged. Scores of the size of 1 move by r as
    well, and the output with them: sqrt(2) r in all. Layer l adds to a stream of 2 l parts (one of attention and one
    of the mlp per layer) of about one size, so its attention has 1 / 2 l of the power. A relative error of the stream
    goes on through a layer as it is, and those of the layers add in squares: r sqrt(1 + 1/2 + ... + 1/layers).
    """
    return ONE_ROUNDING * unit * float(np.sqrt(sum(1 / layer for layer in range(1, layers + 1))))


def _reads_nothing(keys: Rows) -> Bool:
    """Rows of the forward that a prompt begins with: what they attend to is computed in it, bool [T]."""
    begins = (keys.round == 0) & (keys.root == 0)
    first = set(zip(keys.prompt_id[begins].tolist(), keys.call_id[begins].tolist(), strict=True))
    calls = zip(keys.prompt_id.tolist(), keys.call_id.tolist(), strict=True)
    reads_nothing: Bool = np.array([call in first for call in calls], dtype=np.bool_) & (keys.round == 0)
    return reads_nothing


# ---- the draft's -----------------------------------------------------------------------------------------------------


def _of_draft(context: Context, pair: Pair) -> _Found:
    """Attention recomputed over keys and values as the cache keeps them, and as they were computed."""
    differs = tuple(one.site for one in context.diff.sites if one.site.endswith(".attn.context") and one.divergence)
    sites = tuple(dict.fromkeys(differs))
    replays = (context.control, context.replay)
    seen = [
        _recomputed(side, replay)
        for side, replay, held in zip(SIDES, replays, pair, strict=True)
        if replay is not None and held.rounds
    ]
    if not seen:
        return _Found(f"the draft's attention was not recomputed: {context.no_replay}", sites, shown=None)
    fresh = _all([one.fresh for one in seen])
    return _Found("; ".join(one.words for one in seen), sites, _all([one.shown for one in seen]), fresh)


def _recomputed(side: str, replay: Replay) -> _Found:
    """The draft's attention of one side with and without the rounding, in words, and whether the rounding is there."""
    cache = replay.recorded.cache
    coarse, plain = worst_attention(replay), worst_attention(unrounded(replay))
    if coarse is None or plain is None:
        return _Found(f"the draft's attention in {side} could not be recomputed", shown=None)
    if cache is None:
        return _Found(f"the draft's attention in {side} shows no such rounding: {plain.against()}")
    which = "those of earlier forwards" if cache.fresh else "all"
    words = (
        f"the draft's attention in {side}, recomputed over keys and values of which {which} are rounded to "
        f"{cache.kept.name}: {coarse.against()}; over those as computed: {plain.words()}"
    )
    # where both are within rounding, or neither is, nothing is proved of the cache
    proved = coarse.size <= 1 < plain.size
    return _Found(words, shown=proved or None, fresh=cache.fresh if proved else None)


def _all(shown: Sequence[bool | None]) -> bool | None:
    return False if False in shown else None if None in shown else True


def _lengths(context: Context) -> str:
    """What both sides got, as far as the traces tell."""
    length = context.diff.accept_length
    before = length.reference if length.reference is not None else length.predicted
    if length.observed is None or before is None:
        return ""
    return f"; accept length {length.observed:.2f} in serving, {before:.2f} in training"


CAUSE = Cause(
    "kv-cache-dtype",
    "A little lower accept length, or none; rows differ that attend to the cache.",
    "The dtypes of both caches. The draft's attention recomputed over keys and values rounded to the cache's dtype: "
    "its error falls to rounding. The target's attention is not recorded: that its features differ by the cache is "
    "plausible and no proof, and said only where the draft's cache shows the rounding or cannot be judged, rows that "
    "read nothing cached differ clearly less, and the others by no more than such rounding does in so many layers. "
    "Otherwise they stay unexplained.",
    "Nothing, if the option is meant; to compare without it, serve with --kv-cache-dtype auto.",
    ("target.hidden.0", "layer.0.attn.context"),
    check,
    last=True,
    of_server=True,
)
