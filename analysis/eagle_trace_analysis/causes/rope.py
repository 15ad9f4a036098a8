"""Rotary embedding: frequencies, layout, and how far the table reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import (
    RECORD_VALUES,
    Cause,
    Hypothesis,
    Outcome,
    as_trained,
    confirmed,
    counterfactual,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.comparison.metrics import relative_error
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed
from eagle_trace_analysis.trainers.speculators import DECODER

Real = NDArray[Any]
#: shares of a head that are rotated in published models
SHARES = (1.0, 0.5, 0.25, 0.75)
#: powers of ten that are tried as a base of scaled frequencies, and how many
THETAS = (2.0, 8.0, 61)


def _sites(context: Context) -> list[str]:
    return context.layer_sites("attn.q_rope", "attn.k_rope")


def check_theta(context: Context) -> Outcome:
    """Other frequencies: the deployed config's, or those that the recorded rotation shows."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        mine = replay.form.rope
        served = context.served_form.rope if context.served_form else None
        if served is not None:
            # the share of the head, and how tables are rounded, are other causes'
            served = replace(served, partial=mine.partial, interleaved=mine.interleaved, rounded=mine.rounded)
            if served != mine:
                words = replace(served, partial=1.0).words()
                yield Hypothesis(f"the deployed {words}", replay.varied(rope=served), deployed=True)
        fitted = fit_theta(replay, node.step)
        if fitted is not None:
            words = f"theta {fitted:.6g} (fitted to the recorded rotation)"
            plain = replace(mine, theta=fitted, kind="default", parameters={})
            yield Hypothesis(words if mine.kind == "default" else f"{words}, no scaling", replay.varied(rope=plain))
        scaled = fit_scaled_theta(replay, node.step)
        if scaled is not None:
            words = f"theta {scaled:.6g} (fitted to the recorded rotation)"
            yield Hypothesis(words, replay.varied(rope=replace(mine, theta=scaled)))

    return counterfactual(context, _sites(context), others, lambda _: _fix(context), own=("rope frequencies",))


def _fix(context: Context) -> str:
    words = context.form.rope.words() if context.form else "rope_parameters"
    return as_trained(context, "rope", ("rope",), words, f"set rope_parameters as trained ({words})")


def fit_theta(replay: Replay, step: int = 0) -> float | None:
    """The base of the frequencies that turned recorded q into recorded q_rope at a step, None if no rows show it.

    Of a rotation without scaling, whose pair i turns by theta^(-2 i / size) per position.
    """
    frequency = _frequencies(replay, step)
    if frequency is None:
        return None
    size = int(replay.form.head_dim * replay.form.rope.partial)
    index = np.arange(1, len(frequency))
    good = frequency[1:] > 1e-9
    if not good.any():
        return None
    # small angles drown in rounding; the first pairs tell theta best
    theta = np.exp(-np.log(frequency[1:][good]) * size / (2 * index[good]))
    return float(np.median(theta[: max(1, size // 8)]))


def fit_scaled_theta(replay: Replay, step: int = 0) -> float | None:
    """The base with which the trained scaling comes nearest to the recorded rotation; None if there is no scaling."""
    frequency, rope = _frequencies(replay, step), replay.form.rope
    if frequency is None or rope.kind == "default":
        return None
    some = np.arange(1, max(3, len(frequency) // 4 + 1))
    some = some[(some < len(frequency)) & (frequency[np.minimum(some, len(frequency) - 1)] > 1e-9)]
    if not some.size:
        return None

    def off(power: float) -> float:
        found = replace(rope, theta=10.0**power).frequencies(replay.form.head_dim)
        return float("inf") if found is None else float(np.square(np.log(found[0][some] / frequency[some])).sum())

    powers = np.linspace(*THETAS)
    best = min(powers.tolist(), key=off)
    low, high = best - (powers[1] - powers[0]), best + (powers[1] - powers[0])
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if off(left) < off(right) else (left, high)
    return float(10.0 ** ((low + high) / 2))


def _frequencies(replay: Replay, step: int) -> Real | None:
    """Angles per position that turned recorded q into recorded q_rope at a step [rotated / 2]; None if no rows show it.

    Between positions that are 1 to 3 apart no pair goes round once, so the angle of a pair from one to the other is
    their distance times its frequency. At position 0 every angle is 0.
    """
    size = int(replay.form.head_dim * replay.form.rope.partial)
    half = size // 2
    found = _turned_queries(replay)
    if found is None or half < 2:
        return None
    before, after, there = found
    rows = np.flatnonzero(there & (replay.recorded.keys.step == step))
    position, first = np.unique(replay.recorded.keys.position[rows], return_index=True)
    if not len(position):
        return None
    neighbours = replay.form.rope.interleaved
    one, other = (slice(0, size, 2), slice(1, size, 2)) if neighbours else (slice(0, half), slice(half, size))
    x, y = before[rows[first]], after[rows[first]]
    a, b, c, d = x[..., one], x[..., other], y[..., one], y[..., other]
    turned = (a * c + b * d).sum(axis=1) + 1j * (a * d - b * c).sum(axis=1)
    if position[0] > 0:
        position, turned = np.insert(position, 0, 0), np.insert(turned, 0, 1.0, axis=0)
    apart = np.diff(position)
    near = apart <= 3
    if not near.any():
        return None
    angle = np.angle(turned[1:][near] * np.conj(turned[:-1][near]))
    frequency: Real = np.median(angle / apart[near, None], axis=0)
    return frequency


def _turned_queries(replay: Replay) -> tuple[Real, Real, NDArray[np.bool_]] | None:
    """What is rotated of the first layer's queries, before and after [S, heads, size], and the rows that have both."""
    before, after = (replay.recorded.values(f"layer.0.attn.{name}") for name in ("q", "q_rope"))
    size, latent = replay.form.head_dim, replay.form.latent
    width = size + (latent.nope if latent is not None else 0)
    if before is None or after is None or before.values.shape[1] % width or after.values.shape[1] % size:
        return None
    x, y = before.values.reshape(len(before.values), -1, width), after.values.reshape(len(after.values), -1, size)
    # of latent attention the last part of each head is rotated
    return (x[..., width - size :], y, before.present & after.present) if x.shape[1] == y.shape[1] else None


def check_layout(context: Context) -> Outcome:
    """Neighbours rotated instead of halves, or another share of the head."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        rope = replay.form.rope
        served = context.served_form.rope.partial if context.served_form else rope.partial
        if served != rope.partial:
            changed = replay.varied(rope=replace(rope, partial=served))
            yield Hypothesis(f"the deployed {served:g} of each head rotated", changed, deployed=True)
        flipped = replace(rope, interleaved=not rope.interleaved)
        words = "neighbouring elements rotated" if flipped.interleaved else "halves rotated"
        says = context.served_form is not None and context.served_form.rope.interleaved == flipped.interleaved
        yield Hypothesis(words, replay.varied(rope=flipped), deployed=says)
        for share in dict.fromkeys((*SHARES, fit_share(replay))):
            if share is not None and share not in (rope.partial, served):
                yield Hypothesis(f"{share:g} of each head rotated", replay.varied(rope=replace(rope, partial=share)))

    return counterfactual(
        context,
        _sites(context),
        others,
        lambda words: _layout_fix(context, words),
        own=("rope layout",),
    )


def _layout_fix(context: Context, words: str) -> str:
    if "of each head" in words:
        return as_trained(
            context,
            "rope",
            ("rope",),
            f"{_share(context)} of each head rotated",
            f"rotate {_share(context)} of each head, as trained (partial_rotary_factor)",
        )
    trained, served = context.form, context.served_form
    if trained is not None and served is not None and trained.rope.interleaved != served.rope.interleaved:
        return f"set rope_interleave {str(trained.rope.interleaved).lower()} in the deployed config, as trained"
    return f"the server has {words}: serve with the layout of the training, or permute q and k weights for it"


def fit_share(replay: Replay) -> float | None:
    """The share of a head that recorded q_rope turned: its last elements are those of q; None if no row shows it."""
    found = _turned_queries(replay)
    rows = np.flatnonzero(found[2] & (replay.recorded.keys.position >= 1)) if found is not None else np.empty(0, int)
    if found is None or not rows.size:
        return None
    before, after, _ = found
    size = replay.form.head_dim
    off = np.abs(after[rows] - before[rows]).reshape(-1, size).max(axis=0)
    scale = np.abs(before[rows]).max()
    turned = np.flatnonzero(off > 1e-3 * scale)
    return float(turned[-1] + 1) / size if len(turned) else None


def _share(context: Context) -> str:
    return f"{context.form.rope.partial:g}" if context.form else "the same share"


def check_tables(context: Context) -> Outcome:
    """Tables whose frequencies, or angles, were rounded to bfloat16 before cosines were taken."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        mine = replay.form.rope
        served = context.served_form.rope.rounded if context.served_form else ""
        for rounded in ("", "frequencies", "angles"):
            if rounded != mine.rounded:
                words = f"{rounded} of the rotary tables rounded to bfloat16" if rounded else "exact rotary tables"
                yield Hypothesis(words, replay.varied(rope=replace(mine, rounded=rounded)), rounded == served)

    def fix(_: str) -> str:
        if context.form is not None and context.form.rope.rounded:
            return (
                "the training computes with rotary tables that were built anew in bfloat16, after a sequence longer "
                "than max_position_embeddings + 20 (SpecForge): raise max_position_embeddings in the draft's config "
                "above the longest sequence, and train again"
            )
        return "keep the server's rotary frequencies in float32"

    return counterfactual(context, _sites(context), others, fix, own=("rope frequencies",))


def check_reach(context: Context) -> Outcome:
    """Positions beyond the deployed max_position_embeddings."""
    longest = int(context.serve.rows.position.max(initial=0))
    # a server may have loaded what the trainer wrote
    limit = context.served.get(DECODER, context.served).get("max_position_embeddings")
    if limit is None:
        return not_tested("the serve trace names no max_position_embeddings", "give --serve-draft")
    if longest < int(limit):
        return ruled_out(f"the largest position served is {longest}, the deployed limit {int(limit):,}")
    replay = context.replay
    if replay is None:
        return not_tested(
            f"positions up to {longest} pass the deployed limit {limit}; {context.no_replay}", RECORD_VALUES
        )
    inside: list[float] = []
    outside: list[float] = []
    allowed = 0.0
    for site in _sites(context):
        allowed = max(allowed, replay.allowed(site)["rho_max"])
        for step in replay.recorded.steps:
            found = replay.recompute(site, step)
            if isinstance(found, Recomputed):
                d, y = found.recorded - found.expected, found.expected
                rho = relative_error((d * d).sum(axis=1), (y * y).sum(axis=1))
                beyond = replay.recorded.keys.position[found.rows] >= int(limit)
                inside += rho[~beyond].tolist()
                outside += rho[beyond].tolist()
    if not outside:
        return not_tested(f"no row past the deployed limit {limit} could be recomputed", RECORD_VALUES)
    worst_in, worst_out = max(inside, default=0.0), max(outside)
    figures = (
        f"rotation up to position {int(limit) - 1}: error {worst_in:.1e}; from {limit} on ({len(outside)} rows): "
        f"{worst_out:.1e}; {allowed:.1e} allowed"
    )
    if worst_in <= allowed < worst_out:
        return confirmed(figures, context.fix("max-position", "raise max_position_embeddings"), "layer.0.attn.q_rope")
    return ruled_out(figures)


CAUSES = (
    Cause(
        "rope-theta",
        "Slightly to very low accept length; queries are equal before the rotation.",
        "The rotation recomputed with the deployed theta or scaling, and with the theta that q and q_rope show.",
        "Copy the rope parameters of the training config into the deployed one.",
        ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
        check_theta,
    ),
    Cause(
        "rope-layout",
        "Accept length near 1; queries are equal before the rotation.",
        "The rotation recomputed on neighbouring elements instead of halves, and on other shares of each head.",
        "Serve with the layout of the training, or permute the rows of q and k for it.",
        ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
        check_layout,
    ),
    Cause(
        "rope-tables",
        "Lower accept length the longer the text; queries are equal before the rotation.",
        "The rotation recomputed with tables of frequencies, or angles, that were rounded to bfloat16, and without.",
        "Keep rotary frequencies in float32; train no sequence beyond the tables that the trainer built at the start.",
        ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
        check_tables,
    ),
    Cause(
        "max-position",
        "Fine on short requests, collapses past a length.",
        "The rotation recomputed row by row: right below the deployed max_position_embeddings, wrong from it on.",
        "Raise max_position_embeddings to the target's.",
        ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
        check_reach,
        of_server=True,
    ),
)
