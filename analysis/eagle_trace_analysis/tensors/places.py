"""Which trained row, column, channel or head stands where: finding rearrangements, and saying them in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Real = NDArray[Any]

#: recorded channels that are matched at once, so that the distances of 16,384 channels take 64 MB and not 1 GB
AT_ONCE = 1024
_LISTED = 12


def match_channels(recorded: Real, expected: Real, allowed: float = 0.0) -> tuple[Int, Real]:
    """For each recorded channel the expected one it is most like [C], and the relative error of that match [C].

    A channel that is within `allowed` of the expected one at its own place stays there, whatever else it is like:
    channels that are equal, or zero, are no rearrangement.

    Args:
        recorded: [T, C]; T of a few dozen make a chance match impossible.
        expected: [T, E] on the same rows, E >= C.
        allowed: relative error of a channel.
    """
    square = (expected**2).sum(axis=0)
    place = np.empty(recorded.shape[1], dtype=np.int64)
    for start in range(0, len(place), AT_ONCE):
        mine = recorded[:, start : start + AT_ONCE]
        # |x - y|^2 = x^2 - 2 x y + y^2, for all pairs at once; then exactly for the pairs chosen
        place[start : start + AT_ONCE] = (square[None, :] - 2 * mine.T @ expected).argmin(axis=1)
    error = _off(recorded, expected, place, square)
    own = np.arange(len(place))
    at_home = _off(recorded, expected, own, square)
    stays = at_home <= np.maximum(allowed, error)
    return np.where(stays, own, place), np.where(stays, at_home, error)


def _off(recorded: Real, expected: Real, place: Int, square: Real) -> Real:
    off = ((recorded - expected[:, place]) ** 2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error: Real = np.sqrt(off / square[place])
    # a channel of zeros is right if both are
    return np.where(square[place] > 0, error, np.where(off > 0, np.inf, 0.0))


def match_rows(held: Real, was: Real) -> Int:
    """For each row of `held` [N, M] the row of `was` that is equal to it, element for element; -1 for none. A row that
    is equal to the one at its own place stays there.
    """
    known: dict[bytes, int] = {}
    for at in range(len(was) - 1, -1, -1):
        known[was[at].tobytes()] = at
    count = min(len(held), len(was))
    place = np.array([known.get(row.tobytes(), -1) for row in held], dtype=np.int64)
    own = np.flatnonzero((held[:count] == was[:count]).all(axis=1))
    place[own] = own
    return place


def order_words(place: Int, head: int | None = None, noun: str = "row", part: str = "head") -> str:
    """A rearrangement in words: two or more blocks exchanged, whole heads, halves of heads interleaved.

    Args:
        place: where each comes from, int64 [N]; no -1.
        head: rows of a head, if they make heads.
        noun: what one of them is called.
        part: what a head is called.
    """
    count = len(place)
    if np.array_equal(place, np.arange(count)[::-1]):
        return f"all {count} {noun}s in reverse order"
    if head and count % head == 0 and (words := _within_heads(place.reshape(-1, head))) is not None:
        return words
    size = _block(place, head)
    starts = place.reshape(-1, size)[:, 0] // size
    what = noun if size == 1 else part if size == head else f"block of {size} {noun}s"
    many = f"{noun}s" if size == 1 else f"{part}s" if size == head else f"blocks of {size} {noun}s"
    moved = np.flatnonzero(starts != np.arange(len(starts)))
    if len(moved) == 2 and set(starts[moved]) == set(moved.tolist()):
        return f"{many} {moved[0]} and {moved[1]} exchanged"
    order = ", ".join(str(int(one)) for one in starts[:_LISTED])
    order += f", ... ({len(moved)} of {len(starts)} moved)" if len(starts) > _LISTED else ""
    if len(np.unique(starts)) < len(starts):
        lost = np.setdiff1d(np.arange(len(starts)), starts)
        return f"{many} in the order {order}: trained {what} {int(lost[0])} is nowhere, another stands twice"
    return f"{many} in the order {order}"


def _block(place: Int, head: int | None) -> int:
    """The largest size of blocks that moved as wholes: of a head if that is one, else any."""
    count = len(place)

    def whole(size: int) -> bool:
        blocks = place.reshape(-1, size)
        starts = blocks[:, 0]
        return bool((starts % size == 0).all() and (blocks == starts[:, None] + np.arange(size)).all())

    if head and count % head == 0 and whole(head):
        return head
    divisors = (count // parts for parts in range(2, count + 1) if count % parts == 0)
    return next(size for size in divisors if whole(size))


def _within_heads(heads: Int) -> str | None:
    """Heads at their places whose elements went from halves to pairs, as for a rotation of neighbours, or back."""
    size = heads.shape[1]
    if size % 2:
        return None
    inside = heads - np.arange(len(heads))[:, None] * size
    paired = np.arange(size).reshape(2, -1).T.reshape(-1)
    for order, words in (
        (paired, "from two halves to neighbours"),
        (np.argsort(paired), "from neighbours to two halves"),
    ):
        moved = (inside == order).all(axis=1)
        still = (inside == np.arange(size)).all(axis=1)
        if moved.any() and (moved | still).all():
            return f"the elements of each head put in another order, {words} (as for a rotation of the other layout)"
    return None
