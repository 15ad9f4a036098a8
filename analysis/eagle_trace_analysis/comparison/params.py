"""Parameters as both hosts loaded them, and where each is used."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from eagle_trace.reader import Trace
from eagle_trace.sites import site_of_parameter
from eagle_trace_analysis.comparison.tolerance import ONE_ROUNDING, UNIT


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two rows of params.parquet hold the same numbers: by digest, or by norm if the dtypes differ or one was
    put together from the shards of several ranks and so has no digest.
    """
    if a["dtype"] == b["dtype"] and a["digest"] and b["digest"]:
        return bool(a["digest"] == b["digest"])
    # of equal numbers, the norms differ by how they were summed or by the rounding to the other dtype
    allowed = 1e-9 if a["dtype"] == b["dtype"] else _of_rounding(a, b)
    close = abs(a["norm"] - b["norm"]) <= allowed * abs(b["norm"])
    return bool(close and a["nonfinite"] == b["nonfinite"] and list(a["shape"]) == list(b["shape"]))


def _of_rounding(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """How much the norm of N numbers may change, relatively, when they are rounded from one dtype to the other.

    By at most u. Errors are random: 0.425 u / sqrt(N) is the standard deviation for numbers of one size, some 30 times
    that where a thousandth of them holds most of the norm; and 4 u^2 for what of rounding is no accident.
    """
    unit = max(UNIT.get(str(row["dtype"]), 0.0) for row in (a, b))
    count = max(1, math.prod(b["shape"]))
    return min(unit, 200 * ONE_ROUNDING * unit / math.sqrt(count) + 4 * unit * unit)


def differing(train: Trace, serve: Trace) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Parameters that both hosts loaded and that do not hold the same numbers, in the order of training: name, and the
    rows of params.parquet of training and serving.

    Those that are held in another form (`other_form`) are left out: of them this cannot be said.
    """
    pairs = _pairs(train, serve)
    return [(name, a, b) for name, (a, b) in pairs.items() if comparable(a, b) and not same(a, b)]


def other_form(train: Trace, serve: Trace) -> list[str]:
    """Parameters whose numbers cannot be compared, each with why: another shape, or quantised on one side alone."""
    found = []
    for name, (a, b) in _pairs(train, serve).items():
        if not comparable(a, b):
            served, trained = (f"{list(row['shape'])} {row['dtype']}" for row in (b, a))
            found.append(f"{name} ({served}, trained {trained})")
    return found


def _pairs(train: Trace, serve: Trace) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    trained, served = loaded(train), loaded(serve)
    return {name: (row, served[name]) for name, row in trained.items() if name in served}


def loaded(trace: Trace) -> dict[str, dict[str, Any]]:
    """Rows of params.parquet by speculators' names."""
    return {row["canonical_name"]: row for row in trace.table("params").to_pylist()}


def comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two rows of params.parquet are of one shape, and both floats of some size or both of one other dtype."""
    return _form(a) == _form(b)


def _form(row: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    dtype = str(row["dtype"])
    return tuple(row["shape"]), "float" if dtype in UNIT else dtype


def shown_at(name: str) -> str:
    """The site a parameter shows at first, of any parameter: at the latest where everything comes together."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return site_of_parameter(name) or (f"layer.{layer.group(1)}.out" if layer else "logits")
