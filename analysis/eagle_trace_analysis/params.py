"""Parameters as both hosts loaded them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.reader import Trace


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two rows of params.parquet hold the same numbers: by digest, or by norm if the dtypes differ or one was
    put together from the shards of several ranks and so has no digest.
    """
    if a["dtype"] == b["dtype"] and a["digest"] and b["digest"]:
        return bool(a["digest"] == b["digest"])
    # of equal numbers, the norms differ by how they were summed or by the rounding to the other dtype
    allowed = 1e-9 if a["dtype"] == b["dtype"] else 4e-3
    close = abs(a["norm"] - b["norm"]) <= allowed * abs(b["norm"])
    return bool(close and a["nonfinite"] == b["nonfinite"] and list(a["shape"]) == list(b["shape"]))


def differing(train: Trace, serve: Trace) -> list[str]:
    """Names of the parameters that both hosts loaded and that do not hold the same numbers."""
    trained, served = (
        {row["canonical_name"]: row for row in trace.table("params").to_pylist()} for trace in (train, serve)
    )
    return [name for name, row in trained.items() if name in served and not same(row, served[name])]
