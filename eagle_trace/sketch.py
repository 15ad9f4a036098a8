"""The sketch of a row: 64 signed sums that keep the size of a difference (level ``sketch``).

A **count sketch** (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", ICALP 2002; for norms
and inner products Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009): every channel
goes into one of 64 buckets with a sign of its own, and a bucket is the sum of its channels. For rows x, y of width W

    E |Sx - Sy|^2 = |x - y|^2,    Var |Sx - Sy|^2 <= 2/64 |x - y|^4,

as with a dense random matrix, but it costs W additions instead of 64 W, and one huge channel stays in one bucket, so
that the other 63 still tell of the rest. A row of at most 64 channels is its own sketch.

Which channel goes where is fixed by the width alone, so both sides, every machine and every version agree. Output
i + 1 of SplitMix64 (seed 0) belongs to channel i: its lowest bit is the sign, and channels in ascending order of the
other bits take the buckets 0, 1, ..., 63, 0, 1, ... in turn.

Stored is the sketch of the row scaled to norm 512 (of its finite elements; the others count as 0): as float16 where the
row has 16 bits an element, whose own rounding is far coarser, else as float32. 512 keeps small buckets beside a huge
one above float16's smallest normal number, and the largest possible one below its largest up to a width of 2^20.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace import tensors
from eagle_trace.capture import Array, Shard, Statistics, row_statistics, to_float32

BUCKETS = 64
STORED_NORM = 512.0

#: elements of one block: a block, its gathered copy and their sums stay in a core's L2 cache
_BLOCK_ELEMENTS = 1 << 16
#: the same on a device, where a block is float64
_DEVICE_ELEMENTS = 1 << 22


def buckets(width: int) -> int:
    """Numbers in the sketch of a row of `width` elements."""
    return min(width, BUCKETS)


def stored_dtype(dtype: str) -> str:
    """On-disk dtype name of the sketches of rows of an on-disk dtype."""
    return "float16" if dtype in ("bfloat16", "float16") else "float32"


@dataclass(frozen=True)
class Projection:
    """Which channel goes where: ``sketch[b] = sum over k of signs[k, b] * row[channels[k, b]]``.

    Attributes:
        channels: int64 [K, B]; 0 (with sign 0) where a bucket has no K-th channel.
        signs: 1, -1 or 0, float32 [K, B].
    """

    channels: NDArray[np.int64]
    signs: NDArray[np.float32]


@lru_cache(maxsize=64)
def projection(width: int, shard: Shard | None = None) -> Projection:
    """The projection of rows of `width` elements; of a shard of that width, its part of the whole row's projection."""
    if shard is not None and shard.count > 1:
        return _part(projection(width * shard.count), shard.index * width, width)
    if width <= BUCKETS:
        return Projection(np.arange(width)[None, :], np.ones((1, width), dtype=np.float32))
    words = _split_mix(width)
    places = -(-width // BUCKETS) * BUCKETS
    channels, signs = np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.float32)
    order = np.argsort(words >> np.uint64(1), kind="stable")
    channels[:width] = order
    signs[:width] = 1 - 2 * (words[order] & np.uint64(1)).astype(np.float32)
    return Projection(channels.reshape(-1, BUCKETS), signs.reshape(-1, BUCKETS))


def _part(whole: Projection, first: int, width: int) -> Projection:
    """What a projection does to the channels `first` to ``first + width``, numbered from 0."""
    inside = (whole.signs != 0) & (whole.channels >= first) & (whole.channels < first + width)
    # of each bucket its own channels first, then cut off what no bucket needs
    order = np.argsort(~inside, axis=0, kind="stable")[: max(1, int(inside.sum(axis=0).max()))]
    kept = np.take_along_axis(inside, order, axis=0)
    channels = np.take_along_axis(whole.channels, order, axis=0) - first
    signs = np.take_along_axis(whole.signs, order, axis=0)
    return Projection(np.where(kept, channels, 0), np.where(kept, signs, np.float32(0)))


def _split_mix(count: int) -> NDArray[np.uint64]:
    """The first outputs of SplitMix64 with seed 0 (Steele, Lea and Flood, OOPSLA 2014), uint64 [count]."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_channels(width: int, count: int = BUCKETS) -> NDArray[np.int64]:
    """The channels by which hidden states of every layer are kept (layers.parquet): int64, ascending.

    All of them if `width` is at most `count`; else the first `count` in the order of the sketch's random words, the
    same for every trace. The manifest names them (`settings.layer_channels`).
    """
    if width <= count:
        return np.arange(width, dtype=np.int64)
    order = np.argsort(_split_mix(width) >> np.uint64(1), kind="stable")
    return np.sort(order[:count]).astype(np.int64)


@dataclass(frozen=True)
class Reduced:
    """Rows reduced to what the levels ``stats`` and ``sketch`` keep of them.

    Attributes:
        dtype: on-disk dtype name of the rows.
        width: elements of a row, W.
        statistics: of each row.
        sketch: as stored (scaled to norm 512), `stored_dtype` [T, B]; None at level ``stats``.
    """

    dtype: str
    width: int
    statistics: Statistics
    sketch: Array | None

    def __len__(self) -> int:
        return len(self.statistics.norm)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 28 * len(self) + (0 if self.sketch is None else self.sketch.nbytes)

    @staticmethod
    def concatenate(parts: list[Reduced]) -> Reduced:
        """One from several of the same dtype and width."""
        if len(parts) == 1:
            return parts[0]
        statistics = Statistics(
            *(np.concatenate([getattr(p.statistics, n) for p in parts]) for n in Statistics.__dataclass_fields__)
        )
        sketches = [part.sketch for part in parts if part.sketch is not None]
        return Reduced(parts[0].dtype, parts[0].width, statistics, np.concatenate(sketches) if sketches else None)


def sketch(values: Array, statistics: Statistics, shard: Shard | None = None) -> NDArray[np.float32]:
    """Sketches of rows, scaled to norm 512, float32 [T, B].

    Sums are float32, added slot by slot, so that equal rows have equal sketches to the last bit.

    Args:
        values: [T, W] in any dtype of `eagle_trace.capture.DTYPES`.
        statistics: of these rows (`row_statistics`).
        shard: which part of the whole rows they are; B is the whole row's.
    """
    width, norm = values.shape[1], statistics.norm
    fixed = projection(width, shard)
    channels = fixed.channels.reshape(-1)
    out = np.empty((len(values), fixed.channels.shape[1]), dtype=np.float32)
    rows = max(1, _BLOCK_ELEMENTS // max(1, width))
    gathered = np.empty((min(rows, len(values)), len(channels)), dtype=np.float32)
    for start in range(0, len(values), rows):
        x = to_float32(values[start : start + rows])
        if statistics.nonfinite[start : start + rows].any():
            x = np.where(np.isfinite(x), x, np.float32(0))
        y = gathered[: len(x)]
        np.take(x, channels, axis=1, out=y, mode="clip")
        # signs are +-1, so that a fused multiply-add rounds as an addition does
        y = y.reshape(len(x), *fixed.channels.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            np.einsum("tkb,kb->tb", y, fixed.signs, out=out[start : start + rows])
    scaled = _scale(out, norm)
    odd = np.flatnonzero(~np.isfinite(scaled).all(axis=1))
    if odd.size:
        # sums of elements near the largest float overflow: scale before they are added
        x = np.nan_to_num(values[odd].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        x *= (STORED_NORM / norm[odd])[:, None]
        scaled[odd] = np.einsum("tkb,kb->tb", x[:, channels].reshape(len(odd), *fixed.channels.shape), fixed.signs)
    return scaled


def _scale(sums: NDArray[np.float32], norm: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled: NDArray[np.float32] = sums * np.where(norm > 0, STORED_NORM / norm, 0.0)[:, None]
        return scaled.astype(np.float32)


def unscale(stored: Array, norm: NDArray[np.float64]) -> NDArray[np.float32]:
    """Sketches of the rows themselves, from what is stored; float32 [T, B], held within float32's range."""
    largest = float(np.finfo(np.float32).max)
    wide = stored.astype(np.float64) * (norm / STORED_NORM)[:, None]
    return np.clip(wide, -largest, largest, out=wide).astype(np.float32)


def reduce_rows(values: Array, dtype: str, *, sketched: bool, shard: Shard | None = None) -> Reduced:
    """Reduce rows [T, W] of on-disk dtype `dtype` on this machine's processor; no BLAS, whose threads would spin."""
    statistics = row_statistics(values)
    stored = sketch(values, statistics, shard).astype(stored_dtype(dtype)) if sketched else None
    return Reduced(dtype, values.shape[1], statistics, stored)


#: channels and signs as tensors, by device, width and shard
_ON_DEVICE: dict[tuple[str, int, Shard | None], tuple[Any, Any]] = {}


def reduce_on_device(tensor: Any, *, sketched: bool, shard: Shard | None = None) -> Any:
    """`reduce_rows` where the tensor [..., W] is, so that some hundred bytes per row leave the device.

    Sums are float64, so the sketch differs from that of `reduce_rows` by float32 rounding. Nothing waits for it.

    Returns:
        What `reduced_of` reads, a float64 tensor [T, 4 (+ B)] of the same device.
    """
    width = int(tensor.shape[-1])
    rows = tensor.detach().reshape(-1, width)
    size = max(1, _DEVICE_ELEMENTS // max(1, width))
    whole = width * (shard.count if shard else 1)
    columns = rows.new_empty(0).double().new_empty(len(rows), 4 + (buckets(whole) if sketched else 0))
    for start in range(0, len(rows), size):
        _reduce_block(rows[start : start + size], columns[start : start + size], shard)
    return columns


def reduced_of(table: NDArray[np.float64], dtype: str, width: int, *, sketched: bool) -> Reduced:
    """Rows of on-disk dtype `dtype` and a width as `reduce_on_device` reduced them."""
    norm, absmax, mean = (np.ascontiguousarray(table[:, at]) for at in range(3))
    statistics = Statistics(norm, absmax, mean, table[:, 3].astype(np.int32))
    return Reduced(dtype, width, statistics, table[:, 4:].astype(stored_dtype(dtype)) if sketched else None)


def _reduce_block(rows: Any, out: Any, shard: Shard | None) -> None:
    """norm, absmax, mean, nonfinite and the scaled sketch of each row into `out`, float64 [T, 4 + B]."""
    out[:, 3] = (~rows.isfinite()).sum(1)
    x = rows.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    out[:, 0] = (x * x).sum(1).sqrt()
    out[:, 1] = x.abs().amax(1)
    out[:, 2] = x.mean(1)
    if out.shape[1] == 4:
        return
    key = (str(x.device), x.shape[1], shard)
    if key not in _ON_DEVICE:
        fixed = projection(x.shape[1], shard)
        signs = fixed.signs.astype(np.float64)
        _ON_DEVICE[key] = tensors.beside(fixed.channels.reshape(-1), x), tensors.beside(signs, x)
    channels, signs = _ON_DEVICE[key]
    sums = (x.index_select(1, channels).reshape(len(x), *signs.shape) * signs).sum(1)
    # a row of norm 0 divides 0 by 0
    out[:, 4:] = (sums * (STORED_NORM / out[:, :1])).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
