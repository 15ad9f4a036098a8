"""Keys of rows as numbers: packed into one integer per row, exactly, so that rows are matched by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace, padded_paths
from eagle_trace_analysis.pairing.pairs import CODE_OF, UNMATCHED, Int


def lookup(keys: Rows, among: Rows) -> Int:
    """Index of each key of one side's `keys` among others of the same side, -1 if it is not there; int64
    [len(keys)].
    """
    code = packed(keys, among, keys.prompt_id.astype(np.int64), among.prompt_id.astype(np.int64))[1]
    wanted, known = code[: len(keys)], code[len(keys) :]
    if not len(known):
        return np.full(len(keys), -1, dtype=np.int64)
    known, first = np.unique(known, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, first[at], -1)


def above(keys: Rows) -> Rows:
    """Keys of the rows one draft step above; those of step 0 stay as they are."""
    path = keys.path.copy()
    if path.shape[1]:
        at = np.flatnonzero(keys.step > 0)
        path[at, keys.step[at] - 1] = -1
    return replace(keys, step=np.maximum(keys.step - 1, 0), path=path)


def topk_starts(rank: NDArray[np.integer]) -> Int:
    """Index of the first entry (rank 0) of each group of topk.parquet."""
    return np.flatnonzero(rank == 0)


def first_of_each(rows: Rows, code: Int) -> tuple[NDArray[np.int8], Int]:
    """Fate of each row so far, and the rows that stand for their key: the first of each, other branches left
    out.
    """
    fate = np.full(len(rows), CODE_OF["other-branch"], dtype=np.int8)
    own = np.flatnonzero(rows.own_path)
    fate[own] = CODE_OF["recomputed"]
    first = own[np.unique(code[own], return_index=True)[1]]
    fate[first] = UNMATCHED
    return fate, first


def packed(train: Rows, serve: Rows, train_prompts: Int, serve_prompts: Int) -> tuple[Int, Int]:
    """One integer a row for (prompt, root, step), and one for the whole key; rows of train, then rows of
    serve.
    """
    both = [
        np.concatenate([train_prompts, serve_prompts]),
        np.concatenate([train.root, serve.root]).astype(np.int64),
        np.concatenate([train.step, serve.step]).astype(np.int64),
    ]
    place = _pack(both)
    deep = np.flatnonzero(both[2] > 0)
    if not deep.size:
        return place, place
    width = max(train.path.shape[1], serve.path.shape[1])
    path = np.full((len(place), width), -1, dtype=np.int64)
    path[: len(train), : train.path.shape[1]] = train.path
    path[len(train) :, : serve.path.shape[1]] = serve.path
    path[np.arange(width)[None, :] >= both[2][:, None]] = -1
    below = np.zeros(len(place), dtype=np.int64)
    below[deep] = _pack(list(path[deep].T)) + 1
    return place, _pack([place, below])


def _pack(columns: Sequence[Int]) -> Int:
    """One integer a row, equal exactly where all columns are equal: mixed radix, renumbered before it would
    overflow.
    """
    packed = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        if not len(column):
            break
        low = int(column.min())
        span = int(column.max()) - low + 1
        if size * span >= 1 << 62:
            packed = np.unique(packed, return_inverse=True)[1].astype(np.int64)
            size = int(packed.max()) + 1
        packed = packed * span + (column - low)
        size *= span
    return packed


def prompt_keys(train: pd.DataFrame, serve: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys([*train["prompt_key"], *serve["prompt_key"]]))


def all_keys(trace: Trace, site: str) -> Rows:
    return trace.rows_of(site) if trace.site_data(site) else no_rows()


def no_rows() -> Rows:
    return Rows.build(prompt_id=[], root=[], step=[], token_id=[], position=[], call_id=0)


def topk_keys(trace: Trace) -> Rows:
    """Keys of the groups of topk.parquet, one row a group; whether a row saw its own path only is looked up
    in `rows`.
    """
    table = trace.table("topk").select(["prompt_id", "root", "step", "path", "rank"])
    first = topk_starts(table.column("rank").to_numpy())
    if not first.size:
        return no_rows()
    table = table.take(first)
    columns = {name: table.column(name).to_numpy() for name in ("prompt_id", "root", "step")}
    nothing = np.zeros(len(first), dtype=np.int32)
    keys = Rows(
        **columns,
        path=padded_paths(table.column("path")),
        own_path=np.ones(len(first), dtype=np.bool_),
        **dict.fromkeys(("round", "call_id", "token_id", "position"), nothing),
    )
    rows = trace.rows
    if rows.own_path.all():
        return keys
    code = packed(keys, rows, keys.prompt_id.astype(np.int64), rows.prompt_id.astype(np.int64))[1]
    own = np.isin(code[: len(keys)], code[len(keys) :][rows.own_path])
    return replace(keys, own_path=own | ~np.isin(code[: len(keys)], code[len(keys) :]))


def same_keys(a: Rows, b: Rows) -> bool:
    if a is b:
        return True
    names = ("root", "step", "prompt_id", "position", "own_path", "path")
    return len(a) == len(b) and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
