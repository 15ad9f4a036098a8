"""Traces that lie and are consistent: what somebody makes who means to deceive, or a tool that nobody knows.

Checksums say nothing about them. They may be compared or refused, but must not end in a traceback, a hang, or memory
that the files do not account for.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.errors import EagleTraceError
from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.comparison.fold import Serial
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed
from eagle_trace_analysis.report import show, show_text
from eagle_trace_analysis.report.json import to_json_text
from eagle_trace_analysis.report.text import render
from tests.support.tables import edit_manifest

Rng = np.random.Generator


def replace_part(trace: Path, name: str, table: pa.Table, rows: int | None = None) -> None:
    """Put a table in place of a file, without checksums, and let the manifest say so."""
    pq.write_table(table, trace / name)

    def change(manifest: dict[str, Any]) -> None:
        size = (trace / name).stat().st_size
        manifest["files"][name] = {"rows": table.num_rows if rows is None else rows, "bytes": size}
        manifest["checksums"].pop(name, None)

    edit_manifest(trace, change)


def read_part(trace: Path, name: str) -> pa.Table:
    """A file of a trace as it is, without eagle-trace's checksums."""
    table = pq.read_table(trace / name, partitioning=None)
    kept = {key: value for key, value in (table.schema.metadata or {}).items() if key != b"eagle_trace.seal"}
    return table.replace_schema_metadata(kept)


_INTEGERS = (-(2**31), -1, 0, 1, 3, 255, 2**31 - 1)
_FLOATS = (float("nan"), float("inf"), -1.0, 0.0, 1e308)
_TEXTS = ("", "\x1b[31m", "fc.out", "layer.9999999999.out", "x" * 3000, "None", "\u202e", "[red]", "../..")


def _other(kind: pa.DataType, value: Any, rng: Rng) -> Any:
    """Something else of the same type."""

    def pick(among: Any) -> Any:
        return among[int(rng.integers(len(among)))]

    if pa.types.is_list(kind):
        length = pick((0, 1, 2, 40))
        return [_other(kind.value_type, None, rng) for _ in range(length)]
    if pa.types.is_struct(kind):
        return {field.name: _other(field.type, None, rng) for field in kind}
    if pa.types.is_boolean(kind):
        return bool(rng.integers(2))
    if pa.types.is_integer(kind):
        return pick(_INTEGERS)
    if pa.types.is_floating(kind):
        return pick(_FLOATS)
    if pa.types.is_string(kind):
        return pick(_TEXTS)
    return value


def lie(table: pa.Table, rng: Rng) -> pa.Table:
    """One column, or the order and number of the rows, is something else."""
    at = int(rng.integers(table.num_columns))
    field = table.schema.field(at)
    values = table.column(at).to_pylist()
    places = rng.integers(len(values), size=int(rng.integers(1, 4))).tolist() if values else []
    kind = int(rng.integers(9))
    made: pa.Array
    if kind == 0:
        return table.drop_columns([field.name])
    if kind == 1:
        return table.take(rng.permutation(len(table)))
    if kind == 2:
        return table.take(rng.integers(len(table), size=len(table) + 2)) if len(table) else table
    if kind == 3:
        return table.slice(0, int(rng.integers(len(table) + 1)))
    if kind == 4:
        made = pa.array([str(value) for value in values])
    elif kind == 5:
        made = pa.array(rng.standard_normal(len(values)))
    else:
        for place in places:
            values[place] = None if kind == 6 else _other(field.type, values[place], rng)
        made = pa.array(values, type=field.type)
    return table.set_column(at, field.name, made)


_FACTS = {
    b"eagle_trace.width": (b"9" * 5001, b"0", b"-1", b"31", b"33", b"64", b"1e3", b"16777216", "\u0663".encode()),
    b"eagle_trace.dtype": (b"float64", b"float16", b"bfloat16", b"int8", b"", b"object"),
    b"eagle_trace.level": (b"stats", b"sketch", b"values", b"shapes", b"", b"7"),
    b"eagle_trace.shard": (b"0/0", b"0/1", b"1/2", b"2/2", b"0/99999999", b"/", b"-1/2", b"0/" + b"9" * 5000),
    b"eagle_trace.site": (b"logits", b"", b"\xff", b"../x", b"layer.0.attn.q"),
    b"eagle_trace.sketch_dtype": (b"float16", b"float64", b""),
    b"eagle_trace.pieces": (b"", b"1:0", b"9:0000000000000000", b"x"),
}


def lie_about(table: pa.Table, rng: Rng) -> pa.Table:
    """The metadata says something else."""
    name = list(_FACTS)[int(rng.integers(len(_FACTS)))]
    among = _FACTS[name]
    facts = dict(table.schema.metadata or {})
    if rng.random() < 0.2:
        facts.pop(name, None)
    else:
        facts[name] = among[int(rng.integers(len(among)))]
    return table.replace_schema_metadata(facts)


_JSON: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**61, 2**70, 1e308, "", "x", "\x1b[2J\u202e", [], [None], ["x"], [[1]], [1, 2**40], {},
    {"a": 1}, {"path": 3}, {"config": {"a": []}}, {"path": "\u0000"}, {"site": "*"},
)  # fmt: skip


def lie_in_manifest(manifest: dict[str, Any], rng: Rng) -> None:
    """A field, or something in one, is something else."""
    place: Any = manifest
    name = list(manifest)[int(rng.integers(len(manifest)))]
    while rng.random() < 0.7 and isinstance(place[name], dict) and place[name]:
        place = place[name]
        name = list(place)[int(rng.integers(len(place)))]
    if rng.random() < 0.15:
        del place[name]
    else:
        place[name] = _JSON[int(rng.integers(len(_JSON)))]
    if rng.random() < 0.3:
        known = ("dropped_keys", "layer_ids", "num_hidden_layers", "config", "path", "features", "sglang_args")
        word = known[int(rng.integers(len(known)))]
        for table in ("target", "draft", "settings"):
            if isinstance(manifest.get(table), dict):
                manifest[table][word] = _JSON[int(rng.integers(len(_JSON)))]


def tell(trace: Path, rng: Rng) -> str:
    """Make `trace` lie about one thing; says which file."""
    if rng.random() < 0.3:
        edit_manifest(trace, lambda manifest: lie_in_manifest(manifest, rng))
        return "manifest.json"
    files = sorted(file.relative_to(trace).as_posix() for file in trace.rglob("*.parquet") if file.is_file())
    tables = [name for name in files if not name.startswith("values/")]
    among = tables if rng.random() < 0.6 else files
    name = among[int(rng.integers(len(among)))]
    table = read_part(trace, name)
    changed = lie(table, rng) if name in tables or rng.random() < 0.5 else lie_about(table, rng)
    rows = None if rng.random() < 0.9 else int(_INTEGERS[int(rng.integers(len(_INTEGERS)))])
    replace_part(trace, name, changed, rows)
    return name


def use(train: Path, serve: Path, *, partial: bool = False) -> list[str]:
    """Everything that reads traces, on both; tracebacks, [] if there was none."""
    problems: list[str] = []

    @contextlib.contextmanager
    def guarded() -> Iterator[None]:
        try:
            with contextlib.suppress(EagleTraceError):
                yield
        except Exception:  # noqa: BLE001 (what it is, is what is asked here)
            problems.append(traceback.format_exc())

    traces: list[Trace] = []
    for path in (train, serve):
        with guarded():
            traces.append(open_trace(path, allow_partial=partial))
    for trace in traces:
        with guarded():
            found = show.summary(trace)
            show.to_json_text(found)
            show_text.render_summary(found)
        with guarded():
            trace._repr_html_()
            repr(trace)
        with guarded():
            show_text.render_row(show.row(trace, "fc.out", 0, 0))
    if len(traces) == 2:
        with guarded():
            result = diff(*traces, executor=Serial())
            result = diagnosed(result, *traces, Checkpoints())
            to_json_text(result)
            render(result, sites="all")
    return problems
