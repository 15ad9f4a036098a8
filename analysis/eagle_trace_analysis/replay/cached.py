"""Attention over keys and values as a host's cache keeps them, which may be coarser than what it computes with."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.comparison.cached import kept
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.recorded import Cache
from eagle_trace_analysis.replay.replay import Measured, Node, Recomputed, Replay


def over_its_cache(replay: Replay) -> Replay:
    """`replay` with keys and values as the draft's cache of its trace keeps them; itself for one that rounds nothing.

    Whether the rows of an extend see one another's keys before or after they were cached is the attention backend's
    choice, which no trace holds; and a cache may be said to be coarser than what attention reads. What reproduces most
    of the recorded rows is taken: a fault of attention may have changed the others.
    """
    held = kept(replay.recorded.trace, draft=True)
    if held is None or not held.rounds:
        return replay

    def reproduced(cache: Cache | None) -> int:
        replay.recorded.cache = cache
        return _reproduced_rows(Replay(replay.recorded, replay.form, replay.weights))

    replay.recorded.cache = max((Cache(held, True), Cache(held, False), None), key=reproduced)
    return Replay(replay.recorded, replay.form, replay.weights)


def unrounded(replay: Replay) -> Replay:
    """`replay` with keys and values as they were computed, whatever the cache makes of them."""
    return replay.varied(view=View(replay.recorded, window=replay.form.window, rounded=False))


def worst_attention(replay: Replay) -> Measured | None:
    """Of attention in all layers at all steps, the one furthest from what was recorded; None if none is recomputed."""
    found = [replay.measure(*node) for node in _attention(replay)]
    return max((one for one in found if isinstance(one, Measured)), key=lambda one: one.size, default=None)


def _reproduced_rows(replay: Replay) -> int:
    """Rows of attention that are within what is allowed."""
    count = 0
    for site, step in _attention(replay):
        found = replay.recompute(site, step)
        if isinstance(found, Recomputed):
            count += int((found.row_errors <= replay.allowed(site)["rho_max"]).sum())
    return count


def _attention(replay: Replay) -> Iterator[Node]:
    sites = [site for site in replay.sites if site.endswith(".attn.context")]
    return ((site, step) for site in sites for step in replay.recorded.steps)
