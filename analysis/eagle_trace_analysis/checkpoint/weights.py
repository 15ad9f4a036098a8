"""Checks on the tensors' numbers: finite, zero, as if never trained, equal to the target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.checkpoint.files import StoredTensor, as_float32
from eagle_trace_analysis.checkpoint.finding import Finding, failed, listed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.names import keeps_own_embedding
from eagle_trace_analysis.checkpoint.quantised import is_packed
from eagle_trace_analysis.checkpoint.scan import Scan, looks_initial
from eagle_trace_analysis.checkpoint.subject import Subject

#: rows compared of a matrix too large to compare whole; of one that lies elsewhere, each row is a request
SAMPLE_ROWS, FETCHED_ROWS = 2048, 16
#: neighbouring rows looked at for being one and the same, and the fewest that prove something
PAIRS, FEWEST_PAIRS = 64, 8
#: fewest rows of a head that say which rows of the target's it began as
FEWEST_ROWS = 32


def _rows_of(count: int, *tensors: StoredTensor) -> int:
    return min(count, FETCHED_ROWS if any(tensor.remote for tensor in tensors) else SAMPLE_ROWS)


def check_values(subject: Subject, scans: Mapping[str, Scan]) -> Finding:
    """NaN and Inf."""
    bad = [f"{scan.name} ({scan.nonfinite:,} of {scan.elements:,})" for scan in scans.values() if scan.nonfinite]
    if bad:
        return failed(
            "finite",
            "nonfinite",
            f"NaN or Inf in {listed(bad)}",
            "a tensor of NaN was never loaded (speculators starts lm_head and embed_tokens so): export "
            "after loading the target's weights",
        )
    elements = sum(scan.elements for scan in scans.values())
    unread = [n for n, tensor in subject.tensors.items() if n not in scans and _holds_numbers(tensor)]
    kinds = ", ".join(sorted({subject.tensors[n].dtype for n in unread}))
    beside = f"; not checked: {listed(unread, 3)}, packed as {kinds}" if unread else ""
    if not scans:
        return skipped("finite", "nonfinite", f"not checked: no value is stored as a plain number{beside}")
    return passed("finite", "nonfinite", f"all {elements:,} floating-point values are finite{beside}")


def _holds_numbers(tensor: StoredTensor) -> bool:
    """Whether a tensor stands for numbers with a fraction that its dtype does not show, or that cannot be read."""
    return tensor.size > 0 and (is_packed(tensor) or tensor.dtype.startswith("F"))


def check_zeros(scans: Mapping[str, Scan]) -> Finding:
    """Tensors, or many rows of one, that are exactly zero; matrices that are one row throughout."""
    # a bias may well be zero, and where the engine wants one that was not trained, zeros are right
    judged = {n: s for n, s in scans.items() if not n.endswith(".bias") and s.elements}
    whole = [scan.name for scan in judged.values() if not scan.nonfinite and scan.largest == 0]
    if whole:
        return failed("zeros", "weights-missing", f"all zero: {listed(whole)}", "ship the trained tensors")
    # scales may well be equal; no training leaves the rows of a matrix alike to the last bit
    alike = [scan.name for n, scan in judged.items() if scan.one_row and not scan.nonfinite and n.endswith("weight")]
    if alike:
        return failed("zeros", "weights-missing", f"one row throughout: {listed(alike)}", "ship the trained tensors")
    # a padding token's row is zero by design, and so may be rows beyond the tokenizer's
    part = [
        f"{s.name} ({s.zero_rows:,} of {s.rows:,} rows)"
        for n, s in judged.items()
        if n != "embed_tokens.weight" and s.zero_rows > 0.01 * s.rows
    ]
    if part:
        return warned(
            "zeros",
            "weights-missing",
            f"zero rows in {listed(part)}",
            "see whether the tensor was written whole (all shards)",
        )
    return passed("zeros", "weights-missing", "no tensor is zero")


def check_initial(subject: Subject, scans: Mapping[str, Scan]) -> Finding:
    """Matrices whose numbers cannot be told from a fresh initialisation."""
    spread = float(subject.full.get("initializer_range", 0.02))
    found = []
    for name, scan in scans.items():
        plain = subject.tensors[name].is_float
        if plain and not scan.nonfinite and scan.largest and name != "embed_tokens.weight":
            why = looks_initial(subject.tensors[name], spread)
            if why:
                found.append(f"{name}: {why}")
    if found:
        return warned(
            "trained",
            "weights-missing",
            f"no different from a fresh initialisation: {listed(found, 3)}",
            "see whether the trained tensor was saved; one that did not train at all looks like this too",
        )
    hidden = [name for name, tensor in subject.tensors.items() if is_packed(tensor)]
    if hidden:
        return skipped(
            "trained",
            "weights-missing",
            f"not checked for the {len(hidden)} quantised matrices; no other looks like a fresh initialisation",
        )
    return passed(
        "trained",
        "weights-missing",
        "no matrix looks like a fresh initialisation (spread, tails and row norms)",
    )


def same_rows(
    left: StoredTensor, right: StoredTensor, to: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> tuple[int, int, float]:
    """How many rows of `left` [n, H] equal row ``to(i)`` of `right`, of how many, and the relative L2.

    At most SAMPLE_ROWS rows, evenly spaced, are compared.

    Two rows are equal if no element differs by more than one rounding to the coarser of the two dtypes.
    """
    count = left.shape[0]
    rows = np.unique(np.linspace(0, count - 1, _rows_of(count, left, right)).astype(np.int64))
    others = to(rows)
    unit = (
        max({"BF16": 2.0**-8, "F16": 2.0**-11}.get(t.dtype, 2.0**-24) for t in (left, right))
        if left.dtype != right.dtype
        else 0.0
    )
    a, b = as_float32(left.rows(rows)), as_float32(right.rows(others))
    off = np.abs(a - b)
    equal = int((off <= unit * np.abs(b) + (1e-7 if unit else 0.0)).all(axis=1).sum())
    norm = float(np.linalg.norm(b.astype(np.float64)))
    return equal, len(rows), float(np.linalg.norm(off.astype(np.float64))) / norm if norm else 0.0


def check_embedding(subject: Subject) -> Finding:
    """The draft's own embedding, which an engine may replace by the target's."""
    name, cause, title = "embedding", "embedding-replaced", subject.engine.TITLE
    own = subject.tensors.get("embed_tokens.weight")
    fix = "train without embed_requires_grad, or serve with an engine that loads the draft's own embedding"
    if own is None:
        return passed(name, cause, f"the draft ships none: {title} shares the target's")
    if keeps_own_embedding(subject):
        return passed(name, cause, f"target_hidden_size differs from hidden_size, so {title} keeps the draft's own")
    if not subject.engine.REPLACES_EMBEDDING:
        return passed(name, cause, f"{title} keeps the draft's own where it is not the target's")
    gap = subject.gap("embedding")
    if gap is not None:
        return failed(name, cause, gap.why, gap.fix)
    theirs = subject.target.embedding if subject.target else None
    if theirs is None or not (own.is_float and theirs.is_float):
        if subject.training is not None:
            return passed(
                name,
                cause,
                "frozen in training (embed_requires_grad is off), so the target's replaces it unchanged",
            )
        return skipped(
            name,
            cause,
            f"{title} replaces the draft's own by the target's: give --target with weights to compare the two",
        )
    if len(own.shape) != 2 or own.shape[1] != theirs.shape[1] or own.shape[0] > theirs.shape[0]:
        return failed(
            name,
            cause,
            f"the draft's is {list(own.shape)}, the target's {list(theirs.shape)}: another target",
            "give the target it was trained for",
        )
    equal, of, error = same_rows(own, theirs, lambda rows: rows)
    figures = f"{equal:,} of {of:,} rows compared equal the target's"
    if equal < of:
        return failed(
            name,
            cause,
            f"{figures} (relative L2 difference {error:.2g}); {title} replaces it by the target's",
            f"{fix}; or see whether this is the target",
        )
    return passed(name, cause, f"{figures}: replacing it changes nothing")


def check_head_rows(subject: Subject) -> Finding:
    """The head's rows against the target's at the ids d2t names: training starts from a copy of these.

    A trained row stays nearer to where it began than to another token's row, so each row is asked which of
    two rows of
    the target's head it resembles more (cosine): the one at its own target id, or the one at the next draft
    row's.
    """
    name, cause = "head-rows", "d2t-stale"
    head, d2t = subject.tensors.get("lm_head.weight"), subject.tensors.get("d2t")
    if head is not None and d2t is not None and _picked_by_offsets(head, d2t):
        return failed(
            name,
            cause,
            "the head has the same row wherever d2t has the same number: its rows were picked by d2t as it is stored, "
            "which are offsets (TorchSpec's convert_to_hf.py --prune-vocab does that)",
            "prune the whole head again, by ids: lm_head[d2t + arange(len(d2t))]",
        )
    theirs = subject.target.head if subject.target else None
    if theirs is None or head is None or not (head.is_float and theirs.is_float):
        return skipped(
            name,
            cause,
            f"the head is stored as {head.dtype}: its rows are not compared"
            if theirs is not None and head is not None and not head.is_float
            else "give --target with weights to compare the head's rows with the target's at the ids of d2t",
        )
    if (
        len(head.shape) != 2
        or head.shape[1] != theirs.shape[1]
        or (d2t is not None and (d2t.dtype != "I64" or d2t.shape != head.shape[:1]))
    ):
        return skipped(name, cause, "the shapes of head, d2t and the target's head do not go together")
    offsets = d2t.read() if d2t is not None else np.zeros(head.shape[0], np.int64)
    own, of = _resembling(head, theirs, offsets + np.arange(len(offsets)))
    if own >= 0.9 * of:
        return passed(
            name,
            cause,
            f"{own:,} of {of:,} rows compared resemble the target's row at d2t's target id more than the next one",
        )
    first, _ = _resembling(head, theirs, np.arange(len(offsets)))
    if first >= 0.9 * of and of >= FEWEST_ROWS:
        moved = int(np.flatnonzero(offsets)[0])
        return failed(
            name,
            cause,
            f"the head's rows are the target's first {len(offsets):,} ({first:,} of {of:,} rows), while d2t maps draft "
            f"ids elsewhere ({own:,} of {of:,}; first draft id {moved} to {moved + int(offsets[moved])})",
            "prune the head by d2t: lm_head[d2t + arange(len(d2t))]; or ship the d2t that the head was trained with",
        )
    other, _ = _resembling(head, theirs, offsets)
    if other >= 0.9 * of:
        return failed(
            name,
            "d2t-absolute",
            f"the head's rows are those of d2t read as ids ({other:,} of {of:,} rows), not as offsets ({own:,})",
            "store offsets: subtract arange once",
        )
    return skipped(
        name,
        cause,
        f"the head resembles the target's at no reading of d2t ({own:,} of {of:,} rows; chance is half), so "
        "it cannot vouch for d2t",
    )


def _picked_by_offsets(head: StoredTensor, d2t: StoredTensor) -> bool:
    """Whether neighbouring rows of the head are one row where their entries of d2t are one number, and else not.

    No training leaves two rows alike to the last bit.
    """
    if not head.is_float or len(head.shape) != 2 or d2t.dtype != "I64" or d2t.shape != head.shape[:1]:
        return False
    offsets = d2t.read()
    same = np.flatnonzero(offsets[1:] == offsets[:-1])
    other = np.flatnonzero(offsets[1:] != offsets[:-1])
    if len(same) < FEWEST_PAIRS or not len(other):
        return False
    many = FEWEST_PAIRS if head.remote else PAIRS
    # read as they are asked for: of a head that was not picked so, the first pair says it
    alike, differ = (
        (head.rows([at, at + 1]) for at in places[np.unique(np.linspace(0, len(places) - 1, many).astype(np.int64))])
        for places in (same, other)
    )
    return all(np.array_equal(one[0], one[1]) and bool(one.any()) for one in alike) and not any(
        np.array_equal(one[0], one[1]) for one in differ
    )


def _resembling(head: StoredTensor, theirs: StoredTensor, ids: NDArray[np.int64]) -> tuple[int, int]:
    """How many sampled rows i of `head` are nearer to row ids[i] of `theirs` than to ids[i + 1], of all."""
    rows = np.unique(np.linspace(0, len(ids) - 2, _rows_of(len(ids) - 1, head, theirs)).astype(np.int64))
    if len(rows) == 0 or ids.min() < 0 or ids.max() >= theirs.shape[0]:
        return 0, max(len(rows), 1)
    ours = as_float32(head.rows(rows))
    own, other = (_cosines(ours, as_float32(theirs.rows(ids[at]))) for at in (rows, rows + 1))
    return int((own > other).sum()), len(rows)


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: NDArray[np.float32] = np.einsum("ij,ij->i", a, b) / np.where(length > 0, length, 1)
    return cosines
