"""The map from draft ids to target ids: is it what the engine takes it for?

SGLang computes ``target id = draft id + d2t[draft id]``: `d2t` holds offsets. Offsets look broken to the eye
(zeros, long
runs of one number), ids look right, and good checkpoints have been "repaired" into bad ones. So three
readings are tried
on the numbers, and the finding gives the score of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.checkpoints import differ_by_padding
from eagle_trace_analysis.checkpoint.files import DTYPES, StoredTensor
from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.subject import Subject

NAME = "d2t"
REPAIR = "d2t = target_ids - torch.arange(len(target_ids))"


@dataclass(frozen=True)
class Reading:
    """Target ids [Vd] under one hypothesis of what the file holds, and how well they fit.

    Attributes:
        in_range: how many lie in [0, target vocabulary).
        ascending: how many of the Vd - 1 steps go up.
        kept: how many equal the ids `t2d` keeps, in order; None without a t2d of as many ids.
    """

    ids: NDArray[np.int64]
    in_range: int
    ascending: int
    kept: int | None

    @property
    def fits(self) -> bool:
        """All in range, strictly increasing, and equal to t2d where there is one."""
        return self.is_map and self.kept in (None, len(self.ids))

    @property
    def is_map(self) -> bool:
        """All in range and strictly increasing."""
        return self.in_range == len(self.ids) and self.ascending == len(self.ids) - 1

    def figures(self) -> str:
        """The scores in words."""
        count = len(self.ids)
        text = (
            f"{self.in_range:,} of {count:,} target ids in range, "
            f"{self.ascending:,} of {count - 1:,} steps strictly increasing"
        )
        return text if self.kept is None else f"{text}, {self.kept:,} of {count:,} equal to t2d"


def read_as(ids: NDArray[np.int64], vocabulary: int, kept: NDArray[np.int64] | None) -> Reading:
    """Score the target `ids` [Vd] against the vocabulary size and the ids that t2d keeps."""
    in_range = int(((ids >= 0) & (ids < vocabulary)).sum())
    same = None if kept is None or len(kept) != len(ids) else int((kept == ids).sum())
    return Reading(ids, in_range, int((np.diff(ids) > 0).sum()), same)


def check_d2t(subject: Subject) -> Finding:
    """Offset form, length, range, order, and agreement with t2d."""
    stored = subject.tensors.get("d2t")
    vocabulary = int(subject.full["vocab_size"])
    rows = _draft_vocabulary(subject)
    if stored is None:
        return _missing(subject, rows, vocabulary)
    theirs = subject.target.config.get("vocab_size") if subject.target else None
    if theirs is not None and differ_by_padding(theirs, vocabulary):
        vocabulary = max(theirs, vocabulary)
    if stored.dtype not in ("I64", "I32", "I16") or len(stored.shape) != 1:
        return failed(
            NAME,
            "d2t-stale",
            f"d2t is stored as {stored.dtype} {list(stored.shape)}: the engine adds it to a range of ids",
            "store d2t as one int64 offset a draft id",
        )
    d2t = stored.read().astype(np.int64)
    if len(d2t) != rows:
        return failed(
            NAME,
            "d2t-stale",
            f"d2t has {len(d2t):,} entries, the draft's head has {rows:,} rows: it was built for another "
            "draft vocabulary",
            _restore(subject),
        )
    kept, kept_from = _kept_ids(subject)
    if kept is not None and len(kept) != len(d2t):
        return failed(
            NAME,
            "d2t-stale",
            f"d2t has {len(d2t):,} entries, but t2d{kept_from} keeps {len(kept):,} target ids",
            _restore(subject),
        )
    return _judge(subject, d2t, vocabulary, kept, kept_from)


def _judge(
    subject: Subject, d2t: NDArray[np.int64], vocabulary: int, kept: NDArray[np.int64] | None, kept_from: str
) -> Finding:
    own = np.arange(len(d2t), dtype=np.int64)
    offsets = read_as(d2t + own, vocabulary, kept)
    absolute = read_as(d2t, vocabulary, kept)
    twice = read_as(d2t + 2 * own, vocabulary, kept)
    where = kept_from if kept is not None else ""
    scores = f"As offsets (ids = d2t + arange, what the engine does): {offsets.figures()}{where}."
    if offsets.fits:
        if kept is None and not d2t.any() and not differ_by_padding(len(d2t), vocabulary):
            return failed(
                NAME,
                "d2t-missing",
                "d2t is all zeros and there is no t2d: taken as it is, draft ids are the first "
                f"{len(d2t):,} of {vocabulary:,} target ids; "
                "zeros are also what d2t holds before a mapping is loaded",
                _restore(subject),
            )
        # true offsets repeat wherever two neighbouring target ids are kept: none repeating is what ids look
        # like
        if kept is None and len(d2t) > 1 and absolute.is_map:
            return warned(
                NAME,
                "d2t-absolute",
                f"{scores} As absolute ids it fits too: {absolute.figures()}. Offsets that never repeat "
                "mean that no two neighbouring "
                "target ids are kept, which is rare; there is no t2d to decide by",
                f"compare with the speculators checkpoint (--reference); if these are ids: {REPAIR}",
            )
        return passed(NAME, "d2t-absolute", _innocent(d2t, scores, absolute))
    others = f"{scores} As absolute ids: {absolute.figures()}. With arange added once more: {twice.figures()}."
    if absolute.fits and d2t.any():
        return failed(
            NAME,
            "d2t-absolute",
            f"absolute target ids are stored where offsets are expected. {others}",
            f"subtract once: {REPAIR}",
        )
    if twice.fits and d2t.any():
        return failed(
            NAME,
            "d2t-absolute",
            f"arange was subtracted twice (offsets were taken for ids and 'repaired'). {others}",
            "undo one subtraction: d2t = d2t + torch.arange(len(d2t)), or restore the file from before",
        )
    if not d2t.any():
        return failed(
            NAME,
            "d2t-missing",
            f"d2t is all zeros, its value before a mapping is loaded. {scores}",
            _restore(subject),
        )
    return _stale(subject, offsets, others, kept, kept_from)


def _stale(subject: Subject, offsets: Reading, scores: str, kept: NDArray[np.int64] | None, kept_from: str) -> Finding:
    unique = len(np.unique(offsets.ids))
    reordered = kept is not None and np.array_equal(np.sort(offsets.ids), kept)
    in_range = offsets.in_range == len(offsets.ids)
    if in_range and offsets.kept is None and unique == len(offsets.ids):
        return warned(
            NAME,
            "d2t-stale",
            "the target ids are distinct and in range but not in ascending order, which speculators never "
            f"writes. {scores}",
            "compare with the checkpoint it came from (--reference)",
        )
    if in_range and reordered:
        why = f"the target ids are those of t2d{kept_from} in another order, and training numbers them in t2d's"
        if not subject.is_speculators:
            return warned(
                NAME,
                "d2t-stale",
                f"{why}, if it masks by t2d (speculators and SpecForge do); the engine reads d2t alone. {scores}",
                "compare with the checkpoint it came from (--reference)",
            )
    elif in_range and offsets.kept is not None and offsets.is_map:
        differ = len(offsets.ids) - offsets.kept
        why = (
            f"a valid map, but {differ:,} of {len(offsets.ids):,} target ids are not those of t2d{kept_from}"
            ": the two come from different data"
        )
    else:
        why = f"no reading of d2t makes a map ({len(offsets.ids) - unique:,} target ids twice)"
    return failed(NAME, "d2t-stale", f"{why}. {scores}", _restore(subject))


def _innocent(d2t: NDArray[np.int64], scores: str, absolute: Reading) -> str:
    zeros = int(np.argmax(d2t != 0)) if d2t.any() else len(d2t)
    distinct = len(np.unique(d2t))
    text = f"d2t is fine: offsets, as the engine expects. {scores}"
    if zeros:
        text += f" It begins with {zeros:,} zeros because the first {zeros:,} draft ids are the same target ids."
    if distinct < len(d2t):
        text += (
            f" It has {distinct:,} distinct value{'s' if distinct > 1 else ''}, and runs of one value are "
            "normal: neighbouring draft ids with neighbouring target ids share"
            f" an offset. Read as absolute ids it would make no map ({absolute.ascending:,} of "
            f"{len(d2t) - 1:,} steps increasing)."
        )
    return f"{text} Do not subtract arange from it."


def _missing(subject: Subject, rows: int, vocabulary: int) -> Finding:
    if rows == vocabulary:
        return passed(
            NAME,
            "d2t-missing",
            f"there is no d2t and none is needed: draft and target share all {vocabulary:,} ids",
        )
    if rows < vocabulary and differ_by_padding(rows, vocabulary):
        return warned(
            NAME,
            "d2t-missing",
            f"there is no d2t, and the draft has {rows:,} of {vocabulary:,} ids: draft ids are taken for the first "
            "target ids, which is right if the rest is padding",
            f"leave it if the tokenizer has no more than {rows:,} tokens; otherwise {_restore(subject)}",
        )
    if subject.tensors.get("lm_head.weight") is None and subject.full.get("draft_vocab_size") is None:
        return skipped(
            NAME,
            "d2t-missing",
            "there is no d2t, and neither a head nor draft_vocab_size to tell the draft vocabulary by",
        )
    return failed(
        NAME,
        "d2t-missing",
        f"there is no d2t, but the draft has {rows:,} ids for {vocabulary:,} target ids: draft ids would be "
        "taken for target ids",
        _restore(subject),
    )


def _draft_vocabulary(subject: Subject) -> int:
    head = subject.tensors.get("lm_head.weight")
    if head is not None and head.shape:
        return head.shape[0]
    return int(subject.full.get("draft_vocab_size", subject.full["vocab_size"]))


def _kept_ids(subject: Subject) -> tuple[NDArray[np.int64] | None, str]:
    """Target ids that t2d keeps, from the draft or else its reference, and a word on where it was."""
    rows = _draft_vocabulary(subject)
    stored, where = subject.tensors.get("t2d"), ""
    if not _is_mask(stored, rows):
        stored = subject.reference.tensors.get("t2d") if subject.reference is not None else None
        where = " of the reference"
    if stored is None or not _is_mask(stored, rows):
        return None, ""
    return np.flatnonzero(stored.read()).astype(np.int64), where


def _is_mask(stored: StoredTensor | None, rows: int) -> bool:
    """Whether a t2d tells which target ids are kept: not where it was never set, or holds ids or offsets."""
    if stored is None or len(stored.shape) != 1 or stored.dtype not in DTYPES:
        return False
    values: NDArray[Any] = stored.read()
    kept = int((values != 0).sum())
    return kept > 0 and bool(((values == 0) | (values == 1)).all()) and (kept < len(values) or kept == rows)


def _restore(subject: Subject) -> str:
    if subject.is_speculators:
        return "rebuild it from the t2d of the training run: d2t = t2d.nonzero() - arange"
    return "copy d2t unchanged from the speculators checkpoint (`eagle-trace export` does)"
