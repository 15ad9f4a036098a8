"""Tensors of a host as arrays, through their own methods: nothing here imports torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from eagle_trace.capture import Array, Shard
from eagle_trace.sketch import Reduced, reduce_tensor


def to_array(tensor: Any, *, copy: bool = True) -> Array:
    """A torch tensor on any device as a contiguous numpy array of the same dtype, a private copy unless told otherwise.

    The copy is made at once: fused kernels overwrite their inputs in place, so a reference would change later.
    """
    host = tensor.detach().to("cpu", copy=copy).contiguous()
    if str(host.dtype) == "torch.bfloat16":
        # numpy has no bfloat16 of its own: pass the bits through int16 (its dtype taken from a tensor, not from torch)
        return host.view(host.new_empty(0).short().dtype).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]


def to_rows(tensor: Any) -> Array:
    """`to_array` with every axis but the last one folded into rows: [T, W]."""
    array = to_array(tensor)
    return array.reshape(-1, array.shape[-1]) if array.ndim != 2 else array


def capture_rows(tensor: Any, level: str, shard: Shard | None = None) -> Array | Reduced:
    """What the writer takes of a tensor at `level`: on a device, rows are reduced there where no values are kept.

    On the host's own processor they are copied as they are (`to_rows`), and the writer's thread reduces them.
    """
    if level in ("stats", "sketch") and tensor.device.type != "cpu":
        return reduce_tensor(tensor, sketched=level == "sketch", shard=shard)
    return to_rows(tensor)


@np.errstate(invalid="ignore", over="ignore")  # garbage weights make infinite logits
def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis in float32 [T, V]."""
    x = logits.astype(np.float32)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def best_ids(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """The `count` best ids of each row, best first, ties by the lower id: ids, logits, log-probabilities [T, K]."""
    x = logits.astype(np.float32)
    count = min(count, x.shape[-1])
    rows = np.arange(len(x))[:, None]
    # partition first: a full sort of a 32,000-wide row costs more than the rest of the capture
    some = np.sort(np.argpartition(-x, count - 1, axis=-1)[:, :count], axis=-1)
    order = some[rows, np.argsort(-x[rows, some], axis=-1, kind="stable")]
    return order, x[rows, order], log_softmax(x)[rows, order]
