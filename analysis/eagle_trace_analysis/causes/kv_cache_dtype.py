"""Keys and values kept in a coarser dtype than they are computed in: an option of the server's, at an expected cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.cached import Kept, kept
from eagle_trace_analysis.comparison.metrics import Metrics, row_errors
from eagle_trace_analysis.comparison.tolerance import FACTOR, ONE_ROUNDING, SPREAD, UNKNOWN_TARGET_LAYERS
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.layers import target_layers
from eagle_trace_analysis.replay.cached import unrounded, worst_attention
from eagle_trace_analysis.replay.replay import Replay

#: the reference's cache and the other side's
Pair = tuple[Kept, Kept]
SIDES = ("training", "serving")
#: rounding is never taken for the cause of features that differ by more than this share of their size
MOST = 0.5
#: what a confirmed cause about the draft's inputs speaks of
GIVEN = ("target.hidden.", "fused", "token", "position", "embed")


@dataclass(frozen=True)
class _Found:
    """What of one model's cache is seen.

    Attributes:
        words: with figures.
        sites: where the two sides differ, in forward order.
        shown: they differ there by the rounding, proved or plausible; None if that could not be looked at.
    """

    words: str
    sites: tuple[str, ...] = ()
    shown: bool | None = False


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
    found = {whose: (_of_target if whose == "target" else _of_draft)(context, pair) for whose, pair in unlike.items()}
    evidence = f"{said}; {'; '.join(one.words for one in found.values())}"
    sites = tuple(site for one in found.values() if one.shown for site in one.sites)
    # what is more than rounding at the target is for others to explain, and all behind it with it
    if not sites or ("target" in found and found["target"].shown is False and found["target"].sites):
        unseen = any(one.sites and one.shown is None for one in found.values())
        return not_tested(evidence, RECORD_VALUES) if unseen else ruled_out(evidence)
    rounding = [side for at, side in enumerate(SIDES) if any(pair[at].rounds for pair in unlike.values())]
    fix = (
        "nothing, if the option is meant: it rounds by design, and its cost is what the accept lengths show; to "
        f"compare without it, record {' and '.join(f'the {side} side' for side in rounding)} with --kv-cache-dtype auto"
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


def _of_target(context: Context, pair: Pair) -> _Found:
    """Features that differ by no more than the rounding may do; the target's own attention was not recorded."""
    sites = tuple(
        site for site in context.feature_sites if (found := context.divergence(site)) and found.kind == "values"
    )
    if not sites:
        return _Found("the target's features agree")
    for name, outcome in context.outcomes.items():
        if outcome.verdict == "confirmed" and (outcome.site or "").startswith(GIVEN):
            return _Found(f"that the target's features differ is explained by {name}")
    results = [one.metrics for site in sites for one in context.results(site)]
    worst = max((one.rho_max for one in results if isinstance(one, Metrics)), default=float("nan"))
    unit = max(one.unit for one in pair if one.rounds)
    layers = target_layers(context) or UNKNOWN_TARGET_LAYERS
    # each layer rounds its keys and its values, and the errors of the layers add in squares
    may = min(MOST, FACTOR * SPREAD["rho_max"] * ONE_ROUNDING * unit * (2.0 * layers) ** 0.5)
    figures = (
        f"the features, from {sites[0]} on, differ by {worst:.1e} in the worst row{_by_round(context)}, where rounding "
        f"the keys and values of {layers} layers may do {may:.1e}"
    )
    if not worst <= may:
        return _Found(f"{figures}: that is not all", sites)
    return _Found(f"{figures} (plausible, not proved: the target's own attention is not recorded)", sites, shown=True)


def _by_round(context: Context) -> str:
    """The first feature's error in rows of prefills, which most backends compute without the cache, and behind them."""
    features = context.features
    if features is None or features.single or features.served[0].shape != features.trained[0].shape:
        return ""
    error = row_errors(features.served[0], features.trained[0])
    prefill = features.serve_keys.round == 0
    if prefill.all() or not prefill.any():
        return ""
    return (
        f" ({error[prefill].max():.1e} at most in {int(prefill.sum())} rows of prefills, "
        f"{error[~prefill].max():.1e} in {int((~prefill).sum())} behind them)"
    )


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
    return _Found("; ".join(words for words, _ in seen), sites, shown=_all([shown for _, shown in seen]))


def _recomputed(side: str, replay: Replay) -> tuple[str, bool | None]:
    """The draft's attention of one side with and without the rounding, in words, and whether the rounding is there."""
    cache = replay.recorded.cache
    coarse, plain = worst_attention(replay), worst_attention(unrounded(replay))
    if coarse is None or plain is None:
        return f"the draft's attention in {side} could not be recomputed", None
    if cache is None:
        return f"the draft's attention in {side} shows no such rounding: {plain.against()}", False
    which = "those of earlier forwards" if cache.fresh else "all"
    words = (
        f"the draft's attention in {side}, recomputed over keys and values of which {which} are rounded to "
        f"{cache.kept.name}: {coarse.against()}; over those as computed: {plain.words()}"
    )
    return words, coarse.size <= 1


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
    "its error falls to rounding. The target's attention is not recorded: its features differ by no more than that "
    "rounding may do, which is plausible and no proof.",
    "Nothing, if the option is meant; to compare without it, serve with --kv-cache-dtype auto.",
    ("target.hidden.0", "layer.0.attn.context"),
    check,
    last=True,
    of_server=True,
)
