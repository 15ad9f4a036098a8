"""Tables: captures as Arrow tables, and tables as the parts of a trace hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_trace.capture import Array, Rows
from eagle_trace.partfile import PartFile
from eagle_trace.schema import TABLES, TRAINING
from eagle_trace.tablechecks import check_rows

#: keys, draft ids, target ids, logits and log-probabilities of some rows; arrays [T, K], best first
Topk = tuple[Rows, Array, Array, Array, Array]


def rows_table(items: Sequence[tuple[Rows, Mapping[str, Array]]]) -> pa.Table:
    """Batches of keys as one table, with the columns of `schema.TRAINING` that are known of them."""
    # joined before they become Arrow columns: a server's batches are a few rows each, and there are thousands
    tables = []
    for known, group in groupby(items, key=lambda item: [(name, array.dtype) for name, array in item[1].items()]):
        batches = list(group)
        training = {name: np.concatenate([columns[name] for _, columns in batches]) for name, _ in known}
        tables.append(_rows_of(Rows.concatenate([rows for rows, _ in batches]), training))
    return pa.concat_tables(tables)


def _rows_of(rows: Rows, training: Mapping[str, Array]) -> pa.Table:
    columns = key_columns(rows)
    for name, kind in TRAINING:
        columns[name] = pa.array(training[name], type=kind) if name in training else pa.nulls(len(rows), kind)
    return pa.Table.from_arrays(list(columns.values()), schema=TABLES["rows"])


def topk_table(items: Sequence[Topk]) -> pa.Table:
    """Batches of best ids as one table, a row an id."""
    tables = []
    for _, group in groupby(items, key=lambda item: item[1].shape[1]):
        rows, *arrays = zip(*group, strict=True)
        tables.append(_topk_of(Rows.concatenate(rows), *(np.concatenate(array) for array in arrays)))
    return pa.concat_tables(tables)


def _topk_of(rows: Rows, draft_ids: Array, target_ids: Array, logits: Array, logprobs: Array) -> pa.Table:
    k = draft_ids.shape[1]
    keys = key_columns(rows.take(np.repeat(np.arange(len(rows)), k)))
    columns = {name: keys[name] for name in ("prompt_id", "root", "step", "path")}
    columns["rank"] = pa.array(np.tile(np.arange(k, dtype=np.int32), len(rows)))
    columns["draft_id"] = pa.array(draft_ids.reshape(-1).astype(np.int32))
    columns["target_id"] = pa.array(target_ids.reshape(-1).astype(np.int64))
    columns["logit"] = pa.array(logits.reshape(-1).astype(np.float32))
    columns["logprob"] = pa.array(logprobs.reshape(-1).astype(np.float32))
    return pa.Table.from_arrays(list(columns.values()), schema=TABLES["topk"])


def key_columns(rows: Rows) -> dict[str, pa.Array]:
    """Arrow columns of the keys, in schema order."""
    lengths = rows.step.astype(np.int64)
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    inside = np.arange(rows.path.shape[1])[None, :] < lengths[:, None]
    return {
        "prompt_id": pa.array(rows.prompt_id),
        "root": pa.array(rows.root),
        "step": pa.array(rows.step),
        "round": pa.array(rows.round),
        "call_id": pa.array(rows.call_id),
        "token_id": pa.array(rows.token_id),
        "position": pa.array(rows.position),
        "path": pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.path[inside])),
        "own_path": pa.array(rows.own_path),
    }


def read_table(part: PartFile, name: str) -> pa.Table:
    """A part of a table; columns that an older version did not write are null.

    Raises:
        TraceDamagedError: it cannot be read, or says what cannot be.
    """
    schema = TABLES[name]
    with part.reading():
        there = set(part.schema.names)
        table = part.read(None, [field.name for field in schema if field.name in there])
        if len(table) != part.rows:
            raise ValueError(f"it has {len(table)} rows, not {part.rows}")
        columns = [
            table.column(field.name).cast(field.type) if field.name in there else pa.nulls(len(table), field.type)
            for field in schema
        ]
        if name == "params" and "shard_count" not in there:
            # traces from before ranks had shards hold digests of other hashes: those are compared by norm
            columns[schema.get_field_index("digest")] = pa.array([""] * len(table), schema.field("digest").type)
        table = pa.Table.from_arrays(columns, schema=schema)
        table.validate(full=True)  # text that is no UTF-8 would fail far from here
        check_rows(name, table)
        return table


def last_prompts(table: pa.Table) -> pa.Table:
    """The last row of each prompt_id, in the order in which prompts were first named."""
    ids = table.column("prompt_id").to_pylist()
    last = {number: at for at, number in enumerate(ids)}
    return table if len(last) == len(ids) else table.take(pa.array(last.values(), pa.int64()))


def whole_params(table: pa.Table) -> pa.Table:
    """Parameters of all ranks as one would hold them: the first copy of each, shards put together.

    A digest is over the bytes of the whole, which no rank had: it is empty where shards were put together. Where a
    shard is missing, so is the parameter.
    """
    # a fused parameter of the host is several rows of one name
    names = list(zip(*(table.column(name).to_pylist() for name in ("name", "canonical_name")), strict=True))
    if len(set(names)) == len(names) and pc.all(pc.is_null(table.column("shard_count")), min_count=0).as_py():
        return table
    shards: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for key, row in zip(names, table.to_pylist(), strict=True):
        shards.setdefault(key, {}).setdefault(row["shard_index"] or 0, row)
    rows = [_whole(list(found.values())) for found in shards.values()]
    return pa.Table.from_pylist([row for row in rows if row is not None], schema=table.schema)


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One parameter from its shards; None if they are not all there."""
    count = parts[0]["shard_count"] or 1
    if count == 1:
        return parts[0]
    if len(parts) != count:
        return None
    shape = list(parts[0]["shape"])
    shape[parts[0]["shard_axis"]] = sum(part["shape"][part["shard_axis"]] for part in parts)
    return parts[0] | {
        "shape": shape,
        "digest": "",
        "norm": math.sqrt(sum(part["norm"] ** 2 for part in parts)),
        "nonfinite": sum(part["nonfinite"] for part in parts),
        "in_checkpoint": all(part["in_checkpoint"] for part in parts),
        **dict.fromkeys(("shard_axis", "shard_index", "shard_count")),
    }
