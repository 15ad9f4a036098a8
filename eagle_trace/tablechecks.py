"""What must hold of the rows of a table, whoever wrote them: the types, the columns that are never null, and the few
numbers that others are looked up by.

All that reads tables relies on it, so that a file which says impossible things is named here and not by a traceback
somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eagle_trace.schema import KEYS, STATISTICS, TABLES

#: columns that are never null, by table; where others are, nothing is known
REQUIRED: dict[str, Sequence[str]] = {
    "prompts": ("prompt_id", "prompt_key", "token_ids"),
    "rows": [name for name, _ in KEYS],
    "calls": ("call_id", "role"),
    "params": ("name", "canonical_name", "shape", "dtype", "digest", "norm", "nonfinite"),
    "topk": TABLES["topk"].names,
    "rounds": ("prompt_id", "round", "root", "proposed", "parents", "accepted", "bonus"),
    "layers": ("prompt_id", "root", "layer", "sample"),
    "routing": TABLES["routing"].names,
    "floors": TABLES["floors"].names,
    "metrics": ("name",),
}
VALUES = [name for name, _ in [*KEYS, *STATISTICS]]
#: more draft steps than any server takes, and few enough that paths of all rows fit in memory
MOST_STEPS = 256
MOST_SHARDS = 1 << 16


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types are the same, whatever the elements of lists are called."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return same_type(one.value_type, other.value_type)
    return bool(one.equals(other))


def check_rows(name: str, table: pa.Table, required: Sequence[str] | None = None) -> None:
    """Refuse rows that cannot have been recorded.

    Args:
        name: of the table; ``values`` for rows of a site.
        table: its rows, in the types of the schema.
        required: columns that are never null; those of `REQUIRED` if None.

    Raises:
        ValueError: what is wrong, in a few words.
    """
    for column in REQUIRED[name] if required is None else required:
        if column in table.column_names and table.column(column).null_count:
            raise ValueError(f"column {column} has empty places")
    for column in table.column_names:
        if any(_null_inside(chunk) for chunk in table.column(column).chunks):
            raise ValueError(f"lists of column {column} have empty places")
    if {"step", "path"} <= set(table.column_names):
        _check_paths(table)
    if name in _RULES and table.num_rows:
        _RULES[name](table)


def _null_inside(array: pa.Array) -> bool:
    if pa.types.is_list(array.type):
        inside = array.flatten()
        return bool(inside.null_count) or _null_inside(inside)
    if pa.types.is_struct(array.type):
        return any(field.null_count or _null_inside(field) for field in array.flatten())
    return False


def _check_paths(table: pa.Table) -> None:
    step = table.column("step").to_numpy()
    if len(step) and (step.min() < 0 or step.max() > MOST_STEPS):
        raise ValueError(f"draft steps go from {step.min()} to {step.max()}")
    if not np.array_equal(pc.list_value_length(table.column("path")).to_numpy(), step):
        raise ValueError("a path has not one token for each draft step")


def _check_topk(table: pa.Table) -> None:
    rank = table.column("rank").to_numpy()
    if rank[0] != 0 or ((rank[1:] != 0) & (rank[1:] != rank[:-1] + 1)).any():
        raise ValueError("the ranks of the best ids do not count from 0")


def _check_calls(table: pa.Table) -> None:
    shapes = _flat(table.column("shapes"))
    if not len(shapes):
        return
    lengths = pc.list_value_length(shapes.field("shape")).to_numpy(zero_copy_only=False)
    if (lengths < 1).any() or (_flat(pa.chunked_array([shapes.field("shape")])).to_numpy() < 0).any():
        raise ValueError("a shape has no sizes, or sizes below 0")


def _check_params(table: pa.Table) -> None:
    for row in table.select(["shape", "shard_axis", "shard_index", "shard_count"]).to_pylist():
        shard = [row[name] for name in ("shard_axis", "shard_index", "shard_count")]
        if any(size < 0 for size in row["shape"]):
            raise ValueError("a parameter's shape has sizes below 0")
        if shard == [None] * 3:
            continue
        if None in shard or not (0 <= shard[0] < len(row["shape"]) and 0 <= shard[1] < shard[2] <= MOST_SHARDS):
            raise ValueError("a parameter is said to be a part that there cannot be")


def _check_layers(table: pa.Table) -> None:
    lengths = _lengths(table, "sample")
    if len(np.unique(lengths)) > 1 or table.column("layer").to_numpy().min() < 0:
        raise ValueError("samples of a layer differ in length, or a layer is below 0")
    if "branch" in table.column_names:
        held = table.filter(pc.is_valid(table.column("branch")))
        if held.num_rows and set(np.unique(_lengths(held, "branch"))) != set(lengths[:1].tolist()):
            raise ValueError("a layer's last branch has not as many channels as its sample")


def _check_values(table: pa.Table) -> None:
    if "nonfinite" in table.column_names and table.column("nonfinite").to_numpy().min() < 0:
        raise ValueError("a row counts fewer than 0 elements that are not finite")


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    found: NDArray[np.int64] = pc.list_value_length(table.column(column)).to_numpy().astype(np.int64)
    return found


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([chunk.flatten() for chunk in column.chunks])


_RULES: dict[str, Callable[[pa.Table], None]] = {
    "topk": _check_topk,
    "calls": _check_calls,
    "params": _check_params,
    "layers": _check_layers,
    "values": _check_values,
}
