"""The best ids of each row: draft ids up to ties, target ids (after d2t) exactly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.checks import row_key
from eagle_trace_analysis.comparison.metrics import IdMetrics, counted_flips
from eagle_trace_analysis.comparison.result import Divergence, SiteResult
from eagle_trace_analysis.pairing.align import Alignment
from eagle_trace_analysis.pairing.keys import above, lookup, topk_keys, topk_starts

Int = NDArray[np.int64]
Float64 = NDArray[np.float64]

BLOCK_GROUPS = 4096


@dataclass(frozen=True)
class _Groups:
    """topk.parquet of one side, by group (one group a row, best id first)."""

    draft_id: Int
    target_id: Int
    logit: Float64
    start: Int
    count: Int

    @classmethod
    def read(cls, trace: Trace) -> _Groups:
        table = trace.table("topk")
        draft_id, target_id, logit, rank = (
            table.column(name).to_numpy() for name in ("draft_id", "target_id", "logit", "rank")
        )
        start = topk_starts(rank)
        count = np.diff([*start.tolist(), len(rank)])
        return cls(draft_id.astype(np.int64), target_id, logit.astype(np.float64), start, count)

    def block(self, groups: Int) -> tuple[Int, Int, Float64]:
        """Draft ids, target ids and logits of some groups, [M, K]; short groups are padded with id -1."""
        width = int(self.count[groups].max())
        inside = np.arange(width)[None, :] < self.count[groups][:, None]
        at = np.where(inside, self.start[groups][:, None] + np.arange(width)[None, :], 0)
        return (
            np.where(inside, self.draft_id[at], -1),
            np.where(inside, self.target_id[at], -1),
            np.where(inside, self.logit[at], np.inf),
        )


@dataclass
class _Found:
    """What is known of each pair of groups."""

    flip: NDArray[np.bool_]
    margin: Float64
    error: Float64
    mismatch: Int
    overlap_draft: Float64
    overlap_target: Float64


def check_topk(
    alignment: Alignment, logit_errors: tuple[Int, Float64], wrong_steps: Collection[int]
) -> dict[tuple[str, int], SiteResult]:
    """Compare the best ids of each row.

    Draft ids: a row whose best id differs counts if the train side's margin between the two exceeds twice the
    row's largest logit error (`metrics.counted_flips`). Target ids: of the draft ids that both sides name,
    exactly; this depends on d2t alone, so it is judged however far the logits are apart.

    Args:
        alignment: of the two traces.
        logit_errors: train row numbers of the logits that were compared, and the largest error of each; empty
            if they were not (the ids' own logits are used then).
        wrong_steps: steps whose logits diverged: no flip is excused there.
    """
    pairs = alignment.pairs("topk.draft_id")
    train, serve = _Groups.read(alignment.train), _Groups.read(alignment.serve)
    found = _compare(train, serve, pairs.train, pairs.serve)
    _use_measured_errors(found, alignment, pairs.train, logit_errors)
    steps = pairs.train_keys.step[pairs.train]
    counted = found.flip & (counted_flips(found.margin, found.error) | np.isin(steps, list(wrong_steps)))
    results = {}
    for step in pairs.steps:
        here = np.flatnonzero(steps == step)
        coverage = pairs.coverage(step)
        for site in ("topk.draft_id", "topk.target_id"):
            if not here.size:
                results[site, step] = SiteResult(site, step, coverage, reason="no rows in common")
                continue
            is_draft = site == "topk.draft_id"
            bad = here[counted[here] if is_draft else found.mismatch[here] >= 0]
            overlap = found.overlap_draft if is_draft else found.overlap_target
            excused = int((found.flip & ~counted)[here].sum()) if is_draft else 0
            metrics = IdMetrics(len(here), len(bad), excused, float(overlap[here].mean()))
            divergence = None
            if bad.size:
                divergence = _divergence(
                    alignment, site, step, int(bad[0]), found, (train, serve), (len(bad), len(here))
                )
            results[site, step] = SiteResult(site, step, coverage, metrics, divergence=divergence)
    for one in unmapped(alignment.serve, serve):
        why = f"{one.words}; first at root {one.root}: draft id {one.draft_id}, which is target id {one.target_id}"
        facts = {"token": one.target_id}, {"token": one.draft_id}
        divergence = Divergence("token", one.step, "tokens", why, *facts)
        coverage = alignment.rows.coverage(one.step)
        results["token", one.step] = SiteResult("token", one.step, coverage, divergence=divergence)
    return results


@dataclass(frozen=True)
class Unmapped:
    """Rows of one draft step that are fed a draft id as if it were a target id.

    Attributes:
        step: the step.
        rows, judged: how many rows, of how many of which that can be told.
        root, draft_id, target_id: of the first of them.
    """

    step: int
    rows: int
    judged: int
    root: int
    draft_id: int
    target_id: int

    @property
    def words(self) -> str:
        """One clause."""
        return (
            f"{self.rows} of {self.judged} rows of draft step {self.step} are fed the draft id that the row above puts "
            "among its best, and not the target id that d2t makes of it"
        )


def unmapped(serve: Trace, groups: _Groups | None = None) -> list[Unmapped]:
    """Draft steps whose tokens are draft ids, by the server's own best ids of the rows above; at most one a step.

    Training replays the tokens that the server drafted, whatever they are, so no comparison of the two sides shows it.
    """
    rows = serve.rows
    later = np.flatnonzero((rows.step > 0) & rows.own_path)
    if not later.size or not serve.table_rows("topk"):
        return []
    later = later[np.linspace(0, len(later) - 1, min(len(later), BLOCK_GROUPS)).astype(np.int64)]
    keys = rows.take(later)
    at = lookup(above(keys), topk_keys(serve))
    later, keys, at = later[at >= 0], keys.take(np.flatnonzero(at >= 0)), at[at >= 0]
    if not at.size:
        return []
    drafts, targets, _ = (groups or _Groups.read(serve)).block(at)
    fed = keys.path[np.arange(len(keys)), keys.step - 1].astype(np.int64)[:, None]
    as_draft = drafts == fed
    judged = (drafts != targets).any(axis=1)
    wrong = judged & as_draft.any(axis=1) & ~(targets == fed).any(axis=1)
    found = []
    for step in np.unique(keys.step):
        here = keys.step == step
        bad = np.flatnonzero(wrong & here)
        if len(bad) < 2 or 2 * len(bad) < (judged & here).sum():
            continue
        first, place = int(bad[0]), int(as_draft[bad[0]].argmax())
        found.append(
            Unmapped(
                int(step),
                len(bad),
                int((judged & here).sum()),
                int(keys.root[first]),
                int(drafts[first, place]),
                int(targets[first, place]),
            )
        )
    return found


def _compare(train: _Groups, serve: _Groups, at_train: Int, at_serve: Int) -> _Found:
    blocks = []
    for start in range(0, len(at_train), BLOCK_GROUPS):
        stop = start + BLOCK_GROUPS
        blocks.append(_compare_block(train.block(at_train[start:stop]), serve.block(at_serve[start:stop])))
    if not blocks:
        none, numbers = np.zeros(0, dtype=np.bool_), np.zeros(0)
        return _Found(none, numbers, numbers, np.zeros(0, dtype=np.int64), numbers, numbers)
    columns = [np.concatenate([getattr(block, name) for block in blocks]) for name in _Found.__dataclass_fields__]
    return _Found(*columns)


def _compare_block(train: tuple[Int, Int, Float64], serve: tuple[Int, Int, Float64]) -> _Found:
    (ids_t, targets_t, logits_t), (ids_s, targets_s, logits_s) = train, serve
    known = (ids_t >= 0)[:, :, None] & (ids_s >= 0)[:, None, :]
    same = (ids_t[:, :, None] == ids_s[:, None, :]) & known
    with np.errstate(invalid="ignore"):
        error = np.where(same, np.abs(logits_t[:, :, None] - logits_s[:, None, :]), 0.0).max(axis=(1, 2))
    # the train side's logit of the server's best id; if it is not among its best, the last of them is an
    # upper bound
    best = ids_t == ids_s[:, :1]
    last = np.where(ids_t >= 0, logits_t, np.inf).min(axis=1)
    theirs = np.where(best.any(axis=1), np.where(best, logits_t, -np.inf).max(axis=1), last)
    wrong = same & (targets_t[:, :, None] != targets_s[:, None, :])
    count = np.maximum(1, np.minimum((ids_t >= 0).sum(axis=1), (ids_s >= 0).sum(axis=1)))
    target_same = (targets_t[:, :, None] == targets_s[:, None, :]) & known
    return _Found(
        flip=ids_t[:, 0] != ids_s[:, 0],
        margin=np.nan_to_num(logits_t[:, 0] - theirs),
        error=np.nan_to_num(error, posinf=np.inf),
        mismatch=np.where(wrong.any(axis=(1, 2)), np.where(wrong.any(axis=2), ids_t, -1).max(axis=1), -1),
        overlap_draft=same.sum(axis=(1, 2)) / count,
        overlap_target=target_same.sum(axis=(1, 2)) / count,
    )


def _use_measured_errors(found: _Found, alignment: Alignment, groups: Int, logit_errors: tuple[Int, Float64]) -> None:
    """Take the largest error over the whole row of logits where it is known, in place."""
    rows, errors = logit_errors
    if not len(rows):
        return
    keys = alignment.pairs("topk.draft_id").train_keys.take(groups)
    at = lookup(keys, alignment.pairs("logits").train_keys.take(rows))
    found.error = np.where(at >= 0, np.maximum(errors[at], found.error), found.error)


def _divergence(
    alignment: Alignment,
    site: str,
    step: int,
    pair: int,
    found: _Found,
    sides: tuple[_Groups, _Groups],
    counts: tuple[int, int],
) -> Divergence:
    pairs = alignment.pairs(site)
    row = row_key(alignment, pairs, pair)
    groups = int(pairs.train[pair]), int(pairs.serve[pair])
    facts = []
    for side, group in zip(sides, groups, strict=True):
        ids, targets, logits = side.block(np.array([group]))
        place = 0 if site == "topk.draft_id" else int((ids[0] == found.mismatch[pair]).argmax())
        facts.append(
            {
                "draft_id": int(ids[0, place]),
                "target_id": int(targets[0, place]),
                "logit": float(logits[0, place]),
            }
        )
    a, b = facts
    if site == "topk.draft_id":
        why = f"best draft id {a['draft_id']} in training, {b['draft_id']} in serving, "
        why += f"margin {found.margin[pair]:.3g} against a largest logit error of {found.error[pair]:.3g}"
    else:
        why = f"draft id {a['draft_id']} is target id {a['target_id']} in training, {b['target_id']} in serving"
    return Divergence(site, step, "ids", f"{counts[0]} of {counts[1]} rows differ; {why}", a, b, row)
