"""Of what kind the difference between two tensors is, and what brings the trained one back if something simple does.

Both are compared as they are stored. A large matrix is judged on evenly spaced rows (`SAMPLE` elements); only where
these cannot tell are all rows read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.checkpoint.files import DTYPE_NAMES, StoredTensor, as_float32
from eagle_trace_analysis.comparison.tolerance import UNIT
from eagle_trace_analysis.tensors.grids import SQUARE, Extent, Grid, grid_of, square_grid_of
from eagle_trace_analysis.tensors.places import match_rows, order_words

Int = NDArray[np.int64]
Real = NDArray[Any]

SAMPLE = 4 << 20
#: columns are told apart by this many rows
COLUMN_ROWS = 64
#: matrices are read whole, for transposition, up to this many elements
WHOLE = 64 << 20
FEW = 0.1
_LISTED = 6


@dataclass(frozen=True)
class Kind:
    """How a tensor differs from the trained one.

    Attributes:
        name: a word for it, by which tensors are put together.
        words: what is so, after the tensor's name.
        back: what brings the trained tensor back; None if nothing simple does.
        error: relative L2 difference of the two.
    """

    name: str
    words: str
    error: float
    back: str | None = None


class Pair:
    """Two tensors of one shape, the trained one and the one that is held.

    Attributes:
        was, held: the trained and the other tensor, stored.
        rows: rows of the sample.
    """

    def __init__(self, was: StoredTensor, held: StoredTensor) -> None:
        self.was, self.held = was, held
        shape = was.shape if len(was.shape) == 2 else (1, was.size)
        self.height, self.width = shape
        count = min(self.height, max(COLUMN_ROWS, SAMPLE // self.width))
        self.rows = np.unique(np.linspace(0, self.height - 1, count).astype(np.int64))

    @cached_property
    def sample(self) -> tuple[Real, Real]:
        """Rows of both in float32, [N, M] each."""
        return self.read(self.was, self.rows), self.read(self.held, self.rows)

    @cached_property
    def unit(self) -> float:
        """Rounding of the coarser dtype, relative."""
        return max(UNIT[DTYPE_NAMES[one.dtype]] for one in (self.was, self.held))

    def extent(self) -> Extent:
        """Least and greatest element of each column of the held tensor, all of its rows read."""
        found = [(y.min(axis=0, keepdims=True), y.max(axis=0, keepdims=True)) for _, _, y in self.blocks()]
        low, high = zip(*found, strict=True)
        return Extent(np.min(low, axis=0), np.max(high, axis=0))

    def read(self, tensor: StoredTensor, rows: Int) -> Real:
        """Some rows in float32 [N, M]; a vector is one row."""
        if len(tensor.shape) != 2:
            return as_float32(tensor.read()).reshape(1, -1)
        if len(rows) == self.height:
            return as_float32(tensor.read())
        return as_float32(tensor.rows(rows))

    def blocks(self) -> Iterator[tuple[int, Real, Real]]:
        """All rows of both, some at a time, with the number of the first."""
        step = max(1, SAMPLE // self.width)
        for start in range(0, self.height, step):
            rows = np.arange(start, min(self.height, start + step))
            yield start, self.read(self.was, rows), self.read(self.held, rows)

    def rounded(self, values: Real) -> Real:
        """As the coarser of the two stored dtypes holds it, so that equal numbers are equal bytes."""
        names = [DTYPE_NAMES[one.dtype] for one in (self.was, self.held)]
        if "bfloat16" in names:
            return as_float32(values.astype(ml_dtypes.bfloat16))
        return as_float32(values.astype(np.float16)) if "float16" in names else values


def kind_of(
    was: StoredTensor, held: StoredTensor, *, head: int | None = None, parts: int = 1, part: str = "head"
) -> Kind | None:
    """How `held` differs from `was`; None if it does not.

    Args:
        was: the trained tensor.
        held: the other one.
        head: rows that make a head, of a projection.
        parts: parts that the columns fall into (the layers' features, of fc; the heads, of attention's output).
        part: what one of them is called.
    """
    if was.shape != held.shape:
        return Kind("another shape", f"is {list(held.shape)}, trained {list(was.shape)}", float("inf"))
    pair = Pair(was, held)
    x, y = pair.sample
    if np.array_equal(x, y):
        return _elsewhere(pair, head)
    error = _relative(y - x, x)
    if (found := _constant(pair, error) or _few(pair, error, head)) is not None:
        return found
    for look in (_cast, _scaled, _shifted):
        if (found := look(pair, error)) is not None:
            return found
    for kind in (_rows_moved(pair, error, head), _columns_moved(pair, error, parts, part), _transposed(pair, error)):
        if kind is not None:
            return kind
    return _on_a_grid(pair, error) or _low_rank(pair, error) or _dense(pair, error)


def _relative(off: Real, x: Real) -> float:
    norm = float(np.linalg.norm(x.astype(np.float64)))
    return float(np.linalg.norm(off.astype(np.float64))) / norm if norm else float("inf")


def _constant(pair: Pair, error: float) -> Kind | None:
    y = pair.sample[1]
    if not np.isfinite(y).all():
        count = int((~np.isfinite(y)).sum())
        return Kind("not finite", f"holds {count:,} elements that are not finite", float("inf"))
    if float(y.min()) == float(y.max()):
        return Kind("constant", f"is {float(y.min()):g} in every element", error)
    return None


def _cast(pair: Pair, error: float) -> Kind | None:
    x, y = pair.sample
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        if np.array_equal(as_float32(x.astype(dtype)), y):
            return _rounded_to(name, pair, error)
    return None


def _rounded_to(name: str, pair: Pair, error: float) -> Kind:
    return Kind(f"rounded to {name}", f"is the trained one rounded to {name}", error, f"store it in {pair.was.dtype}")


def _scaled(pair: Pair, error: float) -> Kind | None:
    x, y = (one.astype(np.float64) for one in pair.sample)
    scale = float((x * y).sum() / (x * x).sum())
    left = _relative(y - scale * x, y)
    if left > 0.6 * pair.unit or abs(scale - 1) < 2 * left:
        return None
    if abs(scale + 1) <= 4 * pair.unit:
        return Kind("negated", "has the other sign in every element", error, "negate it")
    said = _number(scale, max(left / np.sqrt(x.size), pair.unit / 16))
    return Kind("scaled", f"is {said} x the trained one in every element", error, f"divide it by {said}")


def _shifted(pair: Pair, error: float) -> Kind | None:
    x, y = (one.astype(np.float64) for one in pair.sample)
    off = y - x
    shift = float(off.mean())
    if float(off.std()) > pair.unit * float(np.sqrt(np.mean(np.maximum(x * x, y * y)))) or abs(shift) < 8 * off.std():
        return None
    convention = " (as for norms that scale by 1 + w)" if abs(abs(shift) - 1) < 1e-3 else ""
    said = _number(shift, max(float(off.std()) / np.sqrt(x.size), pair.unit / 16))
    return Kind("shifted", f"is off by {said} in every element{convention}", error, f"subtract {said}")


def _number(value: float, deviation: float) -> str:
    """A fitted number with the digits that are not rounding: `deviation` is its standard error, or what rounding to the
    dtype it is stored in does to it, which is not random.
    """
    digits = int(np.clip(np.floor(-np.log10(max(4 * deviation, 1e-9))), 1, 6))
    return f"{value:.{digits}f}".rstrip("0").removesuffix(".")


def _rows_moved(pair: Pair, error: float, head: int | None) -> Kind | None:
    if pair.height == 1:
        return None
    if pair.height * pair.width <= 4 * SAMPLE or _rows_known(pair):
        place = _row_places(pair)
        if (place >= 0).mean() >= 0.99 and (place != np.arange(pair.height)).any():
            whole = np.where(place >= 0, place, np.arange(pair.height))
            return Kind("rows moved", f"has the trained rows at other places: {order_words(whole, head)}", error,
                        "store its rows in the trained order")  # fmt: skip
    return None


def _rows_known(pair: Pair) -> bool:
    """Whether rows of the sample have the norm of a trained row somewhere: cheap to ask of a matrix that is large."""
    norms = np.concatenate([np.linalg.norm(x, axis=1) for _, x, _ in pair.blocks()])
    mine = np.linalg.norm(pair.sample[1], axis=1)
    at = np.minimum(np.searchsorted(np.sort(norms), mine * (1 - 1e-6)), len(norms) - 1)
    return bool((np.abs(np.sort(norms)[at] - mine) <= 2 * pair.unit * mine).mean() > 0.99)


def _row_places(pair: Pair) -> Int:
    """Where each row of `held` comes from, -1 for nowhere: by digests of the rows, so that no matrix is held whole."""
    mine: list[int] = []
    theirs: list[int] = []
    for _, x, y in pair.blocks():
        for rows, digests in ((x, theirs), (y, mine)):
            digests += [hash(row.tobytes()) for row in pair.rounded(rows)]
    a, b = (np.array(one, dtype=np.int64)[:, None] for one in (mine, theirs))
    return match_rows(a, b)


def _columns_moved(pair: Pair, error: float, parts: int, part: str) -> Kind | None:
    x, y = (pair.rounded(one[:COLUMN_ROWS]) for one in pair.sample)
    if pair.height == 1:
        if np.array_equal(np.sort(x), np.sort(y)):
            place = match_rows(np.ascontiguousarray(y.T), np.ascontiguousarray(x.T))
            moved = int((place != np.arange(len(place))).sum())
            return Kind("elements moved", f"has the trained elements at other places ({moved} of {len(place)} moved)",
                        error, "store its elements in the trained order")  # fmt: skip
        return None
    place = match_rows(np.ascontiguousarray(y.T), np.ascontiguousarray(x.T))
    if (place < 0).any() or np.array_equal(place, np.arange(len(place))):
        return None
    words = order_words(place, pair.width // parts if parts > 1 else None, "column", part)
    return Kind("columns moved", f"has the trained columns at other places: {words}", error,
                "store its columns in the trained order")  # fmt: skip


def _transposed(pair: Pair, error: float) -> Kind | None:
    if pair.height == 1 or pair.height * pair.width > WHOLE:
        return None
    x = pair.rounded(as_float32(pair.was.read()))
    y = pair.rounded(as_float32(pair.held.read()))
    if np.array_equal(y.reshape(-1), x.T.reshape(-1)):
        what = "is the trained one transposed" if pair.height == pair.width else "is stored column by column"
        return Kind("transposed", what, error, "transpose it")
    return None


def _few(pair: Pair, error: float, head: int | None) -> Kind | None:
    """A few rows, or a few columns, that differ while all others are equal."""
    x, y = pair.sample
    off = x != y
    columns = np.flatnonzero(off.any(axis=0))
    if 0 < len(columns) <= max(1, FEW * pair.width):
        noun = "column" if pair.height > 1 else "element"
        a, b = x[:, columns], y[:, columns]
        place = match_rows(*(np.ascontiguousarray(pair.rounded(one[:COLUMN_ROWS]).T) for one in (b, a)))
        if np.array_equal(place, np.arange(len(columns))):
            return None  # equal once both are rounded alike
        if (place >= 0).all() and pair.height > 1:
            whole = np.arange(pair.width)
            whole[columns] = columns[place]
            words = f"has the trained columns at other places: {order_words(whole, None, noun)}"
            return Kind("columns moved", words, error, "store its columns in the trained order")
        return _some(pair, a, b, columns, noun, pair.width, error)
    rows = np.flatnonzero(off.any(axis=1))
    if pair.height > 1 and len(rows) <= max(1, FEW * len(off)):
        return _elsewhere(pair, head)
    return None


def _elsewhere(pair: Pair, head: int | None) -> Kind | None:
    """Rows that differ, of all rows: where the sample holds none or few of them."""
    rows, mine, theirs = [], [], []
    square = power = 0.0
    for start, x, y in pair.blocks():
        at = np.flatnonzero((x != y).any(axis=1))
        rows += (start + at).tolist()
        if len(rows) <= 4 * COLUMN_ROWS:
            theirs.append(x[at])
            mine.append(y[at])
        square += float(((y - x).astype(np.float64) ** 2).sum())
        power += float((x.astype(np.float64) ** 2).sum())
    if not rows:
        return None
    x, y = np.concatenate(theirs), np.concatenate(mine)
    error = (square / power) ** 0.5 if power else float("inf")
    found = np.array(rows[: len(x)], dtype=np.int64)
    place = match_rows(pair.rounded(y), pair.rounded(x))
    if np.array_equal(place, np.arange(len(place))) and pair.unit == UNIT[DTYPE_NAMES[pair.held.dtype]]:
        return _rounded_to(DTYPE_NAMES[pair.held.dtype], pair, error)
    if len(found) == len(rows) and (place >= 0).all() and pair.height > 1:
        whole = np.arange(pair.height)
        whole[found] = found[place]
        return Kind("rows moved", f"has the trained rows at other places: {order_words(whole, head)}", error,
                    "store its rows in the trained order")  # fmt: skip
    return _some(pair, x.T, y.T, found, "row", pair.height, error, len(rows))


def _some(
    pair: Pair, was: Real, held: Real, index: Int, noun: str, of: int, error: float, count: int | None = None
) -> Kind:
    """Columns of two matrices [N, K] (rows or columns of the tensor) that alone differ."""
    a, b = was.astype(np.float64), held.astype(np.float64)
    count = count or len(index)
    listed = ", ".join(str(int(one)) for one in index[:_LISTED]) + (", ..." if count > _LISTED else "")
    which = f"{noun} {listed}" if count == 1 else f"{count} of {of} {noun}s ({listed})"
    if not b.any():
        return Kind(f"some {noun}s", f"is zero in {which}", error)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = (a * b).sum(axis=0) / (a * a).sum(axis=0)
        left = np.sqrt(((b - scale * a) ** 2).sum(axis=0) / (b * b).sum(axis=0))
    if len(a) > 1 and np.nanmax(left) <= 0.6 * pair.unit and np.ptp(scale) <= 4 * pair.unit * abs(scale[0]):
        said = _number(float(scale.mean()), max(float(left.mean()) / np.sqrt(a.size), pair.unit / 16))
        text = f"is {said} x the trained one in {which} alone"
        return Kind(f"some {noun}s", text, error, f"divide it by {said} there")
    if len(a) == 1 and count == 1:
        return Kind(f"some {noun}s", f"is {b[0, 0]:.6g} and not {a[0, 0]:.6g} in {which} alone", error)
    return Kind(f"some {noun}s", f"has other numbers in {which} alone", error)


def _on_a_grid(pair: Pair, error: float) -> Kind | None:
    whole = None if len(pair.rows) == pair.height else pair.extent()
    found: Grid | None = grid_of(pair.sample[1], pair.sample[0], pair.unit, whole)
    if found is None and pair.height >= SQUARE:
        first = np.arange(SQUARE)
        found = square_grid_of(pair.read(pair.held, first), pair.read(pair.was, first), pair.unit)
    if found is None:
        return None
    grid = f"{found.format} with one scale per {found.per}"
    words = f"is the trained one rounded to {grid}"
    if not found.rounds_to:
        words = f"lies on the grid of {grid}, and not where the trained one would"
    return Kind(f"{found.format}, one scale per {found.per}", words, error)


def _low_rank(pair: Pair, error: float) -> Kind | None:
    """A change of low rank, as a merged LoRA is one."""
    x, y = pair.sample
    if min(x.shape) < 16:
        return None
    at = np.unique(np.linspace(0, len(x) - 1, min(len(x), 256)).astype(np.int64))
    off = (y[at] - x[at]).astype(np.float64)
    values = np.linalg.svd(off[:, :: max(1, pair.width // 2048)], compute_uv=False) ** 2
    # what rounding adds has every rank
    floor = (pair.unit * float(np.sqrt((y**2).mean()))) ** 2 * off.size / len(values)
    share = np.cumsum(values) / values.sum()
    rank = int(np.searchsorted(share, 0.999)) + 1
    if rank <= len(values) // 4 and values[:rank].min() > 4 * floor:
        return Kind("low rank", f"differs by a change of rank {rank}, as a merged LoRA does", error)
    return None


def _dense(pair: Pair, error: float) -> Kind:
    x, y = (one.astype(np.float64) for one in pair.sample)
    alike = float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    if alike > 0.5:
        return Kind("another state", "is of another state of the training", error)
    return Kind("unrelated", f"has nothing to do with the trained one (cosine {alike:.2f})", error)
