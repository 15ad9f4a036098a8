"""Arrow schemas of every file of a trace (docs/trace-format.md says the same in words)."""

from __future__ import annotations

import pyarrow as pa

from eagle_trace.capture import DTYPES, Shard
from eagle_trace.sketch import buckets, stored_dtype

KEYS = [
    ("prompt_id", pa.int32()),
    ("root", pa.int32()),
    ("step", pa.int32()),
    ("round", pa.int32()),
    ("call_id", pa.int32()),
    ("token_id", pa.int32()),
    ("position", pa.int32()),
    ("path", pa.list_(pa.int32())),
    ("own_path", pa.bool_()),
]

#: what a row of a real training batch has besides its keys; null elsewhere
TRAINING = [
    ("loss_mask", pa.bool_()),
    ("label", pa.int32()),
]

STATISTICS = [
    ("norm", pa.float64()),
    ("absmax", pa.float64()),
    ("mean", pa.float64()),
    ("nonfinite", pa.int32()),
]

SHAPES = pa.list_(pa.struct([("site", pa.string()), ("shape", pa.list_(pa.int32())), ("dtype", pa.string())]))

#: tables that stand beside values/, by file name without the ending
TABLES: dict[str, pa.Schema] = {
    "prompts": pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("prompt_key", pa.string()),
            ("request_id", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("num_prompt_tokens", pa.int32()),
            ("text", pa.string()),
            ("output_ids", pa.list_(pa.int32())),
            ("cached_tokens", pa.int32()),
            ("finish_reason", pa.string()),
        ]
    ),
    "rows": pa.schema([*KEYS, *TRAINING]),
    "calls": pa.schema(
        [
            ("call_id", pa.int32()),
            ("role", pa.string()),
            ("mode", pa.string()),
            ("batch_size", pa.int32()),
            ("tokens", pa.int32()),
            ("shapes", SHAPES),
        ]
    ),
    "params": pa.schema(
        [
            ("name", pa.string()),
            ("canonical_name", pa.string()),
            ("shape", pa.list_(pa.int32())),
            ("dtype", pa.string()),
            ("digest", pa.string()),
            ("norm", pa.float64()),
            ("nonfinite", pa.int64()),
            ("in_checkpoint", pa.bool_()),
            ("shard_axis", pa.int32()),
            ("shard_index", pa.int32()),
            ("shard_count", pa.int32()),
        ]
    ),
    "topk": pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("root", pa.int32()),
            ("step", pa.int32()),
            ("path", pa.list_(pa.int32())),
            ("rank", pa.int32()),
            ("draft_id", pa.int32()),
            ("target_id", pa.int64()),
            ("logit", pa.float32()),
            ("logprob", pa.float32()),
        ]
    ),
    "rounds": pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("round", pa.int32()),
            ("root", pa.int32()),
            ("proposed", pa.list_(pa.int32())),
            ("parents", pa.list_(pa.int32())),
            ("target_argmax", pa.list_(pa.int32())),
            ("accepted", pa.list_(pa.int32())),
            ("bonus", pa.int32()),
        ]
    ),
    "layers": pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("root", pa.int32()),
            ("layer", pa.int32()),
            ("sample", pa.list_(pa.float32())),
            ("branch", pa.list_(pa.float32())),
        ]
    ),
    "routing": pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("root", pa.int32()),
            ("layer", pa.int32()),
            ("gap", pa.float64()),
            ("noise", pa.float64()),
        ]
    ),
    "floors": pa.schema(
        [
            ("site", pa.string()),
            ("step", pa.int32()),
            ("dtype", pa.string()),
            ("reference", pa.string()),
            ("rows", pa.int64()),
            ("rho_median", pa.float64()),
            ("rho_p99", pa.float64()),
            ("rho_max", pa.float64()),
            ("channel_median", pa.float64()),
            ("channel_p99", pa.float64()),
            ("channel_max", pa.float64()),
        ]
    ),
    "metrics": pa.schema(
        [
            ("batch", pa.int32()),
            ("call_id", pa.int32()),
            ("step", pa.int32()),
            ("name", pa.string()),
            ("value", pa.float64()),
        ]
    ),
}


def value_schema(site: str, dtype: str, width: int, level: str, shard: Shard | None = None) -> pa.Schema:
    """Schema of one file below ``values/site=.../`` at `level` (``stats``, ``sketch`` or ``values``)."""
    columns = [*KEYS, *STATISTICS]
    metadata = {"site": site, "dtype": dtype, "width": str(width), "level": level}
    if level == "sketch":
        stored = stored_dtype(dtype)
        whole = width * (shard.count if shard else 1)
        columns.append(("sketch", pa.binary(buckets(whole) * DTYPES[stored].itemsize)))
        metadata["sketch_dtype"] = stored
    if level == "values":
        columns.append(("values", pa.binary(width * DTYPES[dtype].itemsize)))
    if shard is not None:
        metadata["shard"] = f"{shard.index}/{shard.count}"
    return pa.schema(columns, metadata={f"eagle_trace.{key}": value for key, value in metadata.items()})
