"""Attention over keys and values as a host's cache keeps them, which may be coarser than what it computes with."""

from __future__ import annotations

from eagle_trace_analysis.comparison.cached import kept
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.recorded import Cache
from eagle_trace_analysis.replay.replay import Measured, Replay


def over_its_cache(replay: Replay) -> Replay:
    """`replay` with keys and values as the draft's cache of its trace keeps them; itself for one that rounds nothing.

    Whether the rows of an extend see one another's keys before or after they were cached is the attention backend's
    choice, which no trace holds; and a cache may be said to be coarser than what attention reads. What comes nearest to
    the recorded rows is taken.
    """
    held = kept(replay.recorded.trace, draft=True)
    if held is None or not held.rounds:
        return replay

    def off(cache: Cache | None) -> float:
        replay.recorded.cache = cache
        found = worst_attention(Replay(replay.recorded, replay.form, replay.weights))
        return found.size if found is not None else 0.0

    replay.recorded.cache = min((Cache(held, True), Cache(held, False), None), key=off)
    return Replay(replay.recorded, replay.form, replay.weights)


def unrounded(replay: Replay) -> Replay:
    """`replay` with keys and values as they were computed, whatever the cache makes of them."""
    return replay.varied(view=View(replay.recorded, window=replay.form.window, rounded=False))


def worst_attention(replay: Replay) -> Measured | None:
    """Of attention in all layers at all steps, the one furthest from what was recorded; None if none is recomputed."""
    found = [
        replay.measure(site, step)
        for site in replay.sites
        if site.endswith(".attn.context")
        for step in replay.recorded.steps
    ]
    measured = [one for one in found if isinstance(one, Measured)]
    return max(measured, key=lambda one: one.size, default=None)
