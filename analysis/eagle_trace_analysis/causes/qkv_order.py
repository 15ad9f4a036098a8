"""Queries, keys and values in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.families import EAGLE3
from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, innocent, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed, Replay
from eagle_trace_analysis.tensors.places import match_channels, order_words

Real = NDArray[Any]
ROWS = 64
PARTS = ("q", "k", "v")
#: channels recomputed at once: 512 rows of 14,336 columns are 29 MB in float32
AT_ONCE = 512


def check(context: Context) -> Outcome:
    """Whether the server's channels are the trained ones at other places."""
    sites = context.layer_sites(*(f"attn.{part}" for part in PARTS))
    judged = [one for one in context.nodes(sites) if one.serve is not None]
    if context.replay is None or not judged:
        return not_tested(
            context.no_replay if context.replay is None else "no queries could be recomputed", RECORD_VALUES
        )
    faulty = [one for one in judged if one.verdict == "faulty" and not context.agrees(one.site, one.step)]
    if not faulty:
        return ruled_out(innocent(judged))
    found: dict[str, Outcome] = {}
    for one in faulty:
        layer = one.site.rsplit(".attn", 1)[0]
        if layer not in found:
            found[layer] = _of_layer(context, context.replay, one.site, one.step)
    moved = [one for one in found.values() if one.verdict == "confirmed"]
    if not moved:
        return next(iter(found.values()))
    evidence = "; ".join(one.evidence for one in moved[:2])
    explained = frozenset(site for one in moved for site in one.explains or ())
    return replace(moved[0], evidence=evidence, explains=explained)


def _of_layer(context: Context, replay: Replay, site: str, step: int) -> Outcome:
    """The verdict on one layer, of which `site` is the first that is faulty."""
    layer = site.rsplit(".attn", 1)[0]
    parts = [every_channel(replay, f"{layer}.attn.{part}", step) for part in PARTS]
    found = [one for one in parts if isinstance(one, Recomputed)]
    if len(found) < len(PARTS):
        why = next(one for one in parts if isinstance(one, str))
        return not_tested(f"{site} differs, but {why}", RECORD_VALUES)
    expected, recorded = (
        np.concatenate([getattr(one, name) for one in found], axis=1) for name in ("expected", "recorded")
    )
    allowed = 4 * max(replay.allowed(f"{layer}.attn.{part}")["channel_median"] for part in PARTS)
    place, error = match_channels(recorded, expected, allowed)
    moved = int((place != np.arange(len(place))).sum())
    if not moved:
        return ruled_out(f"all {len(place)} channels of q, k and v are at their trained places")
    exact = float(np.quantile(error, 0.99, method="higher"))
    size = replay.form.head_dim
    if exact <= 64 * allowed and float(np.median(error)) <= allowed and _an_order(place, size):
        evidence = (
            f"{site}: each of {len(place)} channels of q, k and v is a trained one, {moved} at another "
            f"place (channel error {np.median(error):.1e}, {allowed:.1e} allowed); "
            f"{_words(place, size, [one.expected.shape[1] for one in found])}"
        )
        fix = context.fix("head-shape", "store q, k and v in the engine's order, head by head")
        explained = frozenset(
            f"{layer}.attn.{part}" for part, one in zip(PARTS, _split(place, found), strict=True) if one
        )
        return replace(confirmed(evidence, fix, site), explains=explained)
    return ruled_out(
        f"{site} differs, and its channels are no rearrangement of the trained ones (nearest: {np.median(error):.1e})"
    )


def every_channel(replay: Replay, site: str, step: int) -> Recomputed | str:
    """A projection on some rows and all of its channels, or why it cannot be recomputed.

    `Replay.recompute` takes a sample of the channels; to find where each went all are needed. They are made some at a
    time, so that a projection of any width takes the memory of `AT_ONCE` of its rows.
    """
    sample = replay.recompute(site, step)
    if isinstance(sample, str):
        return sample
    width = replay.recorded.width(site) or 0
    if sample.expected.shape[1] == width:
        keep = slice(0, ROWS)
        return replace(sample, expected=sample.expected[keep], recorded=sample.recorded[keep], rows=sample.rows[keep])
    layer, part = site.split(".")[1], site.rsplit(".", 1)[1]
    # a norm over each head is given whole heads, all of them, each time
    at_once = width if f"layers.{layer}.self_attn.{part}_norm.weight" in replay.weights else AT_ONCE
    rows = sample.rows[np.unique(np.linspace(0, len(sample.rows) - 1, ROWS).astype(np.int64))]
    expected = [
        replay.channels(site, rows, np.arange(start, min(width, start + at_once))) for start in range(0, width, at_once)
    ]
    target = replay.recorded.values(site)
    assert target is not None
    return Recomputed(np.concatenate(expected, axis=1), target.values[rows], rows, np.arange(width), sample.limits)


def _an_order(place: NDArray[np.int64], size: int) -> bool:
    """Each channel once; or whole heads, some of them more than once."""
    if len(np.unique(place)) == len(place):
        return True
    if len(place) % size:
        return False
    heads = place.reshape(-1, size)
    return bool((heads[:, :1] % size == 0).all() and (heads == heads[:, :1] + np.arange(size)).all())


def _split(place: NDArray[np.int64], parts: list[Recomputed]) -> list[bool]:
    """Of q, k and v, which hold channels that are not at their places."""
    ends = np.cumsum([one.expected.shape[1] for one in parts])
    moved = place != np.arange(len(place))
    return [bool(one.any()) for one in np.split(moved, ends[:-1])]


def _words(place: NDArray[np.int64], size: int, widths: list[int]) -> str:
    """What moved: within q, k and v each, or between them."""
    starts = np.concatenate([[0], np.cumsum(widths)])
    said = []
    for name, first, last in zip(PARTS, starts[:-1], starts[1:], strict=True):
        mine = place[first:last]
        if ((mine < first) | (mine >= last)).any():
            return _between(place, size, widths)
        if (mine != np.arange(first, last)).any():
            said.append(f"of {name}, {order_words(mine - first, size, 'channel')}")
    return "; ".join(said)


def _between(place: NDArray[np.int64], size: int, widths: list[int]) -> str:
    q, k, v = widths
    own = np.arange(len(place))
    if k == v and np.array_equal(place, np.concatenate([own[:q], own[q + k :], own[q : q + k]])):
        return "k and v exchanged"
    groups = k // size if size and k % size == 0 else 0
    if groups and q % k == 0:
        parts = [one.reshape(groups, -1) for one in np.split(own, [q, q + k])]
        grouped = np.concatenate(parts, axis=1).reshape(-1)
        for order, words in ((grouped, "read as"), (np.argsort(grouped), "stored as")):
            if np.array_equal(place, order):
                return f"whole heads: {words} one fused tensor of {groups} groups, each its queries, its key, its value"
    return f"over q, k and v together, {order_words(place, size, 'channel')}"


CAUSE = Cause(
    "qkv-order",
    "Accept length near 1; less if only two heads are exchanged.",
    "Each channel of the server's q, k and v matched with the trained channel it is equal to.",
    "Store the projections in the order the engine splits them (q, k, v; head by head).",
    ("layer.0.attn.q", "layer.0.attn.k", "layer.0.attn.v"),
    check,
    families=(EAGLE3.name,),  # latent attention has no projections of queries, keys and values side by side
)
