"""Two checkpoints, tensor by tensor: what was added, what is gone, what changed and by how much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.checkpoint.files import DTYPES, PIECE_BYTES, Checkpoint, StoredTensor, as_float32
from eagle_trace_analysis.checkpoint.finding import Finding, TensorChange, passed, skipped, warned
from eagle_trace_analysis.engines import SGLANG

NAME = "reference"
#: the change of a tensor whose values were not fetched, and that is alike in shape and dtype
UNREAD = "unread"


def compare(new: Checkpoint, old: Checkpoint, most_fetched: int = 1 << 20) -> list[TensorChange]:
    """All differences of `new` from `old`, by speculators' names; ``renamed`` is a change of name only.

    Of folders that lie elsewhere, tensors of more than `most_fetched` bytes are not read: their change is `UNREAD`.
    """
    ours = {SGLANG.canonical_name(t.name): t for t in new.tensors.values()}
    theirs = {SGLANG.canonical_name(t.name): t for t in old.tensors.values()}
    changes = [TensorChange(n, "gone", f"{_words(theirs[n])} is not in the draft") for n in theirs if n not in ours]
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is None:
            changes.append(TensorChange(name, "added", f"{_words(tensor)} is not in the reference"))
            continue
        alike = (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        if alike and (tensor.remote or other.remote) and tensor.nbytes > most_fetched:
            changes.append(TensorChange(name, UNREAD, "the values were not fetched"))
            continue
        change = _compare_tensor(name, tensor, other)
        if change is not None:
            changes.append(change)
        elif tensor.name != other.name:
            changes.append(TensorChange(name, "renamed", f"{other.name} became {tensor.name}, with the same values"))
    return changes


def summarise(changes: list[TensorChange], compared: int, unread: int = 0) -> Finding:
    """One finding over all changes: a warning if any could change what the draft computes."""
    counts = {
        kind: sum(c.change == kind for c in changes)
        for kind in ("added", "gone", "renamed", "shape", "dtype", "values")
    }
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    # t2d is not used in serving, and a rename is judged by weight-names
    harmless = {c.name for c in changes if c.change == "renamed" or (c.name == "t2d" and c.change in ("gone", "added"))}
    if unread and len(harmless) == len(changes):
        why = f"all {compared} tensors are the reference's in shape and dtype; the values of {unread} were not fetched"
        return skipped(NAME, "", why)
    if not changes:
        return passed(NAME, "", f"all {compared} tensors equal the reference's")
    if len(harmless) == len(changes):
        return passed(NAME, "", f"{words}; every value equals the reference's")
    return warned(
        NAME,
        "",
        f"against the reference: {words}",
        "what was not meant to change (without --quiet it is listed) should be restored from the reference",
    )


def _words(tensor: StoredTensor) -> str:
    return f"{tensor.name} ({tensor.dtype} {list(tensor.shape)})"


def _compare_tensor(name: str, new: StoredTensor, old: StoredTensor) -> TensorChange | None:
    if new.shape != old.shape:
        return TensorChange(name, "shape", f"{list(old.shape)} became {list(new.shape)}")
    if name == "d2t" and len(new.shape) == 1 and not new.is_float and not old.is_float:
        return _compare_map(new, old)
    if new.is_float and old.is_float:
        return _compare_values(name, new, old)
    if new.dtype != old.dtype:
        return TensorChange(name, "dtype", f"{old.dtype} became {new.dtype}", elements=new.size)
    if new.dtype not in DTYPES:
        return (
            None
            if new.nbytes == old.nbytes and _same_bytes(new, old)
            else TensorChange(name, "values", f"the {new.dtype} values differ")
        )
    differing = sum(int((a != b).sum()) for a, b in zip(new.pieces(), old.pieces(), strict=True))
    return (
        TensorChange(name, "values", f"{differing:,} of {new.size:,} values differ", differing, new.size)
        if differing
        else None
    )


def _same_bytes(new: StoredTensor, old: StoredTensor) -> bool:
    raw = (replace(tensor, dtype="U8", shape=(tensor.nbytes,)).pieces() for tensor in (new, old))
    return all(np.array_equal(a, b) for a, b in zip(*raw, strict=True))


def _compare_map(new: StoredTensor, old: StoredTensor) -> TensorChange | None:
    ours, theirs = new.read().astype(np.int64), old.read().astype(np.int64)
    differing = int((ours != theirs).sum())
    if not differing:
        return None
    own, moved = np.arange(len(ours)), ours - theirs
    known = {
        -1: "arange was subtracted",
        1: "arange was added",
        -2: "arange was subtracted twice",
        2: "arange was added twice",
    }
    how = next((f": {words}" for times, words in known.items() if (moved == times * own).all()), "")
    largest = float(np.abs(moved).max())
    return TensorChange(
        "d2t",
        "values",
        f"{differing:,} of {len(ours):,} entries differ{how}",
        differing,
        len(ours),
        largest=largest,
    )


def _compare_values(name: str, new: StoredTensor, old: StoredTensor) -> TensorChange | None:
    differing, squared, norm, largest = 0, 0.0, 0.0, 0.0
    same_dtype = new.dtype == old.dtype
    step = PIECE_BYTES // 4
    alike: list[int] = []
    for index, (a, b) in enumerate(zip(new.pieces(step), old.pieces(step), strict=True)):
        if same_dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
            alike.append(index)
            continue
        left, right = as_float32(a), as_float32(b)
        off = left - right
        # NaN against NaN is no difference
        changed = (off != 0) & ~(np.isnan(left) & np.isnan(right))
        differing += int(changed.sum())
        finite = np.where(np.isfinite(off), off, np.float32(0))
        squared += _square(finite)
        norm += _square(np.where(np.isfinite(right), right, np.float32(0)))
        largest = max(largest, float(np.abs(finite).max(initial=0.0)))
    if not differing:
        return (
            None
            if same_dtype
            else TensorChange(name, "dtype", f"{old.dtype} became {new.dtype}, every value the same", 0, new.size)
        )
    # the norm of the equal pieces is needed only now, and most tensors have no difference: read them again
    # then
    skipped = set(alike)
    norm += sum(_square(as_float32(b)) for index, b in enumerate(old.pieces(step)) if index in skipped)
    relative = (squared / norm) ** 0.5 if norm else 0.0
    kind = "values" if same_dtype else "dtype"
    cast = "" if same_dtype else f"{old.dtype} became {new.dtype}; "
    figures = (
        f"{cast}{differing:,} of {new.size:,} values differ, "
        f"relative L2 {relative:.3g}, largest difference {largest:.3g}"
    )
    return TensorChange(name, kind, figures, differing, new.size, relative, largest)


def _square(values: NDArray[np.float32]) -> float:
    return float(np.dot(values, values))
