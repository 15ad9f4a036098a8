"""What several ranks hold of one thing, put together."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from eagle_trace.capture import Statistics
from eagle_trace.schema import TABLES


def join_params(ranks: list[pa.Table]) -> pa.Table:
    """Parameters as wholes, from what each rank holds: a part's digest says nothing about the whole, its norm does."""
    rows = []
    for same in zip(*(table.to_pylist() for table in ranks), strict=True):
        whole = dict(same[0])
        if whole["shard_axis"] is not None:
            parts = list({part["shard_index"]: part for part in same}.values())
            axis = whole["shard_axis"]
            whole["shape"] = list(whole["shape"])
            whole["shape"][axis] = sum(part["shape"][axis] for part in parts)
            whole["norm"] = float(np.sqrt(sum(part["norm"] ** 2 for part in parts)))
            whole["nonfinite"] = sum(part["nonfinite"] for part in parts)
            whole["digest"] = ""
        rows.append(whole)
    return pa.Table.from_pylist(rows, schema=TABLES["params"])


def join_statistics(parts: list[tuple[int, Statistics]]) -> Statistics:
    """Statistics of whole rows, from the widths and statistics of their parts."""
    finite = np.stack([width - part.nonfinite for width, part in parts])
    sums = np.stack([part.mean for _, part in parts]) * finite
    return Statistics(
        np.sqrt(np.sum([part.norm**2 for _, part in parts], axis=0)),
        np.max([part.absmax for _, part in parts], axis=0),
        sums.sum(axis=0) / np.maximum(1, finite.sum(axis=0)),
        np.sum([part.nonfinite for _, part in parts], axis=0, dtype=np.int32),
    )
