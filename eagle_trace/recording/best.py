"""The best ids of rows of logits, in the host's memory or where the logits are."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_trace import tensors
from eagle_trace.capture import Array

#: elements of one block on a device, where each takes some twenty bytes
_BLOCK_ELEMENTS = 1 << 22


def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis in float32 [T, V]."""
    x = logits.astype(np.float32)
    # garbage weights make infinite scores, and such a row has no probabilities
    with np.errstate(invalid="ignore", over="ignore"):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def best_ids(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """The `count` best ids of each row, best first, ties by the lower id: ids, logits, log-probabilities [T, K]."""
    x = logits.astype(np.float32)
    count = min(count, x.shape[-1])
    rows = np.arange(len(x))[:, None]
    # partition first: a full sort of a 32,000-wide row costs more than the rest of the capture
    some = np.sort(np.argpartition(-x, count - 1, axis=-1)[:, :count], axis=-1)
    # of the scores equal to the last one that is kept, a partition keeps any: 16-bit scores are often equal
    last = x[rows, some].min(axis=-1, keepdims=True)
    for row in np.flatnonzero((x == last).sum(axis=-1) > (x[rows, some] == last).sum(axis=-1)):
        some[row] = np.sort(np.argsort(-x[row], kind="stable")[:count])
    order = some[rows, np.argsort(-x[rows, some], axis=-1, kind="stable")]
    return order, x[rows, order], log_softmax(x)[rows, order]


def best_on_device(logits: Any, count: int) -> tuple[Any, Any, Any]:
    """`best_ids` of a tensor [T, V], as tensors where it is: no row leaves the device, and nothing waits for it."""
    library, width = tensors.library_of(logits), int(logits.shape[-1])
    rows = max(1, _BLOCK_ELEMENTS // max(1, width))
    # of equal scores the lower id: it makes the larger key
    places = width - 1 - library.arange(width, device=logits.device)
    blocks = [
        _best_of_block(library, logits[start : start + rows].float(), places, min(count, width))
        for start in range(0, max(1, len(logits)), rows)
    ]
    ids, scores, logprobs = zip(*blocks, strict=True)
    return library.cat(ids), library.cat(scores), library.cat(logprobs)


def _best_of_block(library: Any, x: Any, places: Any, count: int) -> tuple[Any, Any, Any]:
    # the bits of a float in the order of its value, -0.0 made 0.0 and no number put last: integers have no ties
    bits = (x + 0.0).view(library.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(x.isnan(), -(1 << 31)).long()
    keys = ordered * (1 << 32) + places
    ids = places[0] - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    shifted = x - x.amax(1, keepdim=True)
    return ids, x.gather(1, ids), shifted.gather(1, ids) - shifted.exp().sum(1, keepdim=True).log()
