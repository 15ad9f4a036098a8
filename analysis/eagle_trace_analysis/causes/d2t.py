"""The map from draft ids to target ids, as the server used it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context

Int = NDArray[np.int64]
SITE = "topk.target_id"


class _Map:
    """Draft ids seen on the server with the target ids it made of them, and those of the training."""

    def __init__(self, context: Context) -> None:
        self.problem: str | None = None
        self.whole = False
        self.ids: Int = np.zeros(0, dtype=np.int64)
        self.served = self.trained = self.ids
        table = context.serve.table("topk")
        if not table.num_rows:
            self.problem = "the serve trace holds no best ids"
            return
        ids, first = np.unique(table.column("draft_id").to_numpy(), return_index=True)
        served = table.column("target_id").to_numpy()[first].astype(np.int64)
        offsets = _trained_offsets(context)
        if offsets is not None:
            kept = ids < len(offsets)
            self.ids, self.served = ids[kept].astype(np.int64), served[kept]
            self.trained = self.ids + offsets[self.ids]
            self.size = len(offsets)
        else:
            self._from_topk(context, ids.astype(np.int64), served)
        if not len(self.ids):
            self.problem = self.problem or "no draft id was named by both sides"
        a, b = (side.get("d2t") for side in context.params)
        self.whole = bool(a and b and a["dtype"] == b["dtype"] and a["digest"] and a["digest"] == b["digest"])

    def _from_topk(self, context: Context, ids: Int, served: Int) -> None:
        table = context.train.table("topk")
        theirs, first = np.unique(table.column("draft_id").to_numpy(), return_index=True)
        common, at, there = np.intersect1d(ids, theirs, assume_unique=True, return_indices=True)
        self.ids, self.served, self.size = common.astype(np.int64), served[at], len(common)
        self.trained = table.column("target_id").to_numpy()[first][there].astype(np.int64)

    @property
    def equal(self) -> int:
        """Draft ids with the same target id on both sides."""
        return int((self.served == self.trained).sum())

    def innocent(self) -> str:
        """The evidence that the map is right."""
        if self.whole:
            return f"d2t: same {self.size:,} target ids on both sides (as loaded, bit by bit)"
        return f"d2t: {self.equal:,} of {len(self.ids):,} draft ids seen have the same target id on both sides"


def _trained_offsets(context: Context) -> Int | None:
    draft = context.train_draft
    stored = draft.tensors.get("d2t") if draft else None
    if stored is not None and len(stored.shape) == 1:
        return stored.read().astype(np.int64)
    return None


def _start(context: Context) -> tuple[_Map, Outcome | None]:
    found = _Map(context)
    if (other := context.other_algorithm) is not None:
        return found, ruled_out(f"the server ran {other}, which uses no d2t: see single-layer-features")
    sizes = [
        max((width for width, _ in trace.shapes.get("logits", ())), default=0)
        for trace in (context.train, context.serve)
    ]
    if 0 < sizes[0] != sizes[1] > 0:
        why = f"draft ids are not the same on both sides: {sizes[0]:,} in training, {sizes[1]:,} in serving"
        return found, not_tested(why, "mend the head first (lm-head-from-target) and record again")
    if found.problem is not None:
        return found, not_tested(found.problem, "record both sides at level stats or above")
    if found.equal == len(found.ids):
        return found, ruled_out(found.innocent())
    return found, None


def _reading(found: _Map) -> str | None:
    """Which simple mistake makes the trained map into the served one: ``ids``, ``twice``, ``missing``."""
    offsets = found.trained - found.ids
    # distinguishable only where the trained offset is not 0
    readings = {
        "ids": found.trained + found.ids,  # ids stored, arange added to them
        "twice": found.trained - found.ids,  # arange subtracted once too often
        "missing": found.ids,
    }
    for name in ("missing", "ids", "twice"):
        if np.array_equal(found.served, readings[name]) and offsets.any():
            return name
    return None


def _fix(context: Context, found: _Map, otherwise: str) -> str:
    """What to do about the file, if that is where the wrong map is from."""
    if found.whole:
        return "d2t as loaded is the trained one: the server maps by something else, so update it, or report it"
    return context.fix("d2t", otherwise)


def check_absolute(context: Context) -> Outcome:
    """Ids stored where offsets are expected, or arange subtracted twice."""
    found, outcome = _start(context)
    if outcome is not None:
        return outcome
    reading = _reading(found)
    count = f"{len(found.ids):,} of {len(found.ids):,} draft ids seen"
    if reading == "ids":
        evidence = f"{count}: served target id = trained target id + draft id, so d2t holds ids and not offsets"
        return confirmed(evidence, _fix(context, found, "subtract arange once from d2t"), SITE)
    if reading == "twice":
        evidence = f"{count}: served target id = trained target id - draft id, so arange was subtracted from offsets"
        return confirmed(evidence, _fix(context, found, "add arange once to d2t, or restore the file"), SITE)
    return ruled_out(
        f"{len(found.ids) - found.equal:,} of {len(found.ids):,} target ids differ, and not by the draft id"
    )


def check_missing(context: Context) -> Outcome:
    """Draft ids taken for target ids."""
    found, outcome = _start(context)
    if outcome is not None:
        return outcome
    same = int((found.served == found.ids).sum())
    if _reading(found) == "missing":
        moved = int((found.trained != found.ids).sum())
        evidence = f"all {same:,} draft ids seen are served as target ids; trained, {moved:,} of them are others"
        return confirmed(evidence, _fix(context, found, "ship d2t unchanged (`eagle-trace export` does)"), SITE)
    return ruled_out(f"{len(found.ids) - same:,} of {len(found.ids):,} draft ids are mapped to other target ids")


def check_stale(context: Context) -> Outcome:
    """A map, but not the one of the training."""
    found, outcome = _start(context)
    if outcome is not None:
        return outcome
    if (reading := _reading(found)) is not None:
        return ruled_out(f"the map is the trained one, misread ({reading})")
    differ = np.flatnonzero(found.served != found.trained)
    at = int(differ[0])
    evidence = (
        f"{len(differ):,} of {len(found.ids):,} draft ids seen have another target id, first draft id {found.ids[at]}: "
        f"{found.trained[at]} trained, {found.served[at]} served"
    )
    return confirmed(evidence, _fix(context, found, "copy d2t unchanged from the trained checkpoint"), SITE)


CAUSES = (
    Cause(
        "d2t-absolute",
        "Accept length near 1 though logits are equal.",
        "Target ids as served held against the trained map: they differ by exactly the draft id.",
        "Store offsets: d2t = target_ids - arange, once.",
        (SITE,),
        check_absolute,
    ),
    Cause(
        "d2t-missing",
        "1.12 against 2.99, logits equal.",
        "Target ids as served are the draft ids themselves.",
        "Ship d2t unchanged.",
        (SITE,),
        check_missing,
    ),
    Cause(
        "d2t-stale",
        "Low accept length, logits equal.",
        "Target ids as served are neither the trained ones nor a misreading of them.",
        "Copy d2t from the checkpoint that was trained.",
        (SITE,),
        check_stale,
    ),
)
