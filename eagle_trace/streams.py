"""All streams of one trace: what was handed over finds the table or the site it belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from eagle_trace.capture import Rows, Shard
from eagle_trace.gather import BLOBS, Memo, SiteStream, kind_of, site_table
from eagle_trace.manifest import Manifest
from eagle_trace.parts import Numbers, PartStream, leaves
from eagle_trace.schema import TABLES, value_schema
from eagle_trace.store import Store
from eagle_trace.tables import key_columns, rows_table, topk_table

ROW_GROUP_BYTES = 2 << 20
#: the same where no values are kept: rows are small there
REDUCED_GROUP_BYTES = 512 << 10
TABLE_ROWS = 1 << 14

Make = Callable[[list[Any]], pa.Table]
#: what goes into a trace: ``rows``, ``values``, ``topk`` or ``record``, and the thing itself (`TraceWriter.put_late`)
Part = tuple[str, Any]


class Streams:
    """Everything that is written of one trace, by one thread.

    Args:
        store: the trace.
        manifest: names rank and level; its list of files grows.
        first_id: added to the numbers of prompts and calls in records.
        beat: called after each write that the disk has taken.
    """

    def __init__(self, store: Store, manifest: Manifest, first_id: int, beat: Callable[[], None]) -> None:
        self._store, self._manifest, self._first_id, self._beat = store, manifest, first_id, beat
        self._parts: list[PartStream] = []
        self._tables: dict[str, PartStream] = {}
        self._sites: dict[tuple[str, str, int, Shard | None], SiteStream] = {}
        self._numbers: dict[str, Numbers] = defaultdict(Numbers)
        self._last: tuple[Rows, Rows] | None = None
        # the sites of a forward have the same rows
        self._join = Memo(Rows.concatenate)
        self._keys = Memo(lambda batches: key_columns(self._join(batches)))

    def add(self, kind: str, item: Any) -> None:
        """Take a `Part`; what another rank of the group writes is dropped."""
        if kind == "values":
            site, rows, values, shard = item
            if len(rows):
                self._site(site, *kind_of(values), shard).add(self._numbered(rows), values)
        elif kind == "record":
            self._add_record(*item)
        elif self._leads and len(item[0]):
            table = rows_table if kind == "rows" else topk_table
            numbered = (self._numbered(item[0]), *item[1:])
            self._table(kind, table).add(numbered, len(item[0]) if kind == "rows" else item[1].size)

    @property
    def _leads(self) -> bool:
        """Whether this rank writes what all ranks of its group know."""
        return self._manifest.tp_rank == 0

    def _numbered(self, rows: Rows) -> Rows:
        """Rows with the numbers that prompts and calls of this rank have; the same for all sites of a forward."""
        if not self._first_id:
            return rows
        if self._last is None or rows is not self._last[0]:
            moved = replace(rows, prompt_id=rows.prompt_id + self._first_id, call_id=rows.call_id + self._first_id)
            self._last = rows, moved
        return self._last[1]

    def save(self) -> None:
        """Put everything taken so far into whole files."""
        for site in self._sites.values():
            site.drain()
        for stream in self._parts:
            stream.save()
        self._join.forget()
        self._keys.forget()

    def discard(self) -> None:
        """Leave no unfinished file behind."""
        for stream in self._parts:
            stream.discard()

    def _add_record(self, table: str, given: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        if not self._leads and table != "params":
            return
        record = dict(given() if callable(given) else given)
        for name in ("prompt_id", "call_id"):
            if record.get(name) is not None:
                record[name] += self._first_id
        schema = TABLES[table]
        self._table(table, lambda records: pa.Table.from_pylist(records, schema=schema)).add(record, 1)

    def _site(self, site: str, dtype: str, width: int, shard: Shard | None) -> SiteStream:
        """The stream of rows of a site that are alike."""
        key = site, dtype, width, shard
        stream = self._sites.get(key)
        if stream is None:
            level = self._manifest.level
            schema = value_schema(site, dtype, width, level, shard)
            made = partial(site_table, schema, self._keys)
            group = ROW_GROUP_BYTES if level == "values" else REDUCED_GROUP_BYTES
            parts = self._stream(f"values/site={site}", schema, made, _value_options(schema), group)
            stream = self._sites[key] = SiteStream(level, shard, self._join, parts)
        return stream

    def _table(self, table: str, make: Make) -> PartStream:
        stream = self._tables.get(table)
        if stream is None:
            options = {"compression": "zstd"}
            stream = self._stream(f"{table}.parquet", TABLES[table], make, options, TABLE_ROWS)
            self._tables[table] = stream
        return stream

    def _stream(self, folder: str, schema: pa.Schema, make: Make, options: dict[str, Any], group: int) -> PartStream:
        prefix = f"{folder}/rank{self._manifest.rank}"
        numbers, manifest = self._numbers[prefix], self._manifest
        parts = PartStream(
            self._store, prefix, numbers, schema, make, options, group, manifest.files, manifest.checksums,
            manifest.recording, self._beat,
        )  # fmt: skip
        self._parts.append(parts)
        return parts


def _value_options(schema: pa.Schema) -> dict[str, Any]:
    """How a site's parts are written."""
    plain = [name for name in schema.names if name not in BLOBS]
    # exact bytes: no dictionary, no statistics, no compression, so that reading is a copy and nothing else
    return {
        "compression": {**dict.fromkeys(leaves(plain), "zstd"), **dict.fromkeys(BLOBS, "none")},
        "use_dictionary": leaves([name for name in plain if name not in ("norm", "absmax", "mean")]),
        "write_statistics": leaves(plain),
        "data_page_size": ROW_GROUP_BYTES,
    }
