"""The trace writer: takes captures from the host's thread, writes Parquet from its own.

The host's thread only appends to a queue. Rows of one site are gathered until a row group is full, then written; a
part file is closed when it is large enough, so that a host that is killed loses only the parts still open. Memory is
bounded by the queue's budget plus one row group a site.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.capture import LEVELS, Array, Rows, dtype_name, row_statistics
from eagle_trace.errors import OutputExistsError, RecordingError, UsageError
from eagle_trace.manifest import OPEN_SEAL, SEAL, Manifest
from eagle_trace.schema import TABLES, TRAINING, value_schema

ROW_GROUP_BYTES = 2 << 20
FIRST_PART_BYTES = 1 << 20
LARGEST_PART_BYTES = 64 << 20
QUEUE_BYTES = 256 << 20
TABLE_ROWS = 1 << 14


@dataclass
class _Part:
    """One open Parquet file."""

    path: Path
    writer: pq.ParquetWriter
    rows: int = 0
    bytes: int = 0


@dataclass
class _SiteBuffer:
    """Rows of one (site, dtype, width) that wait for their row group, and the part they go to."""

    schema: pa.Schema
    folder: Path
    rows: list[Rows] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    bytes: int = 0
    part: _Part | None = None


def check_output(path: Path, *, force: bool = False) -> None:
    """Refuse a place for a trace that is taken; changes nothing.

    Raises:
        OutputExistsError: it is a file, or holds something and `force` is not set, or holds something that is no trace.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        is_trace = (path / SEAL).exists() or (path / OPEN_SEAL).exists()
        if not force:
            raise OutputExistsError(f"{path} exists: choose another --out, or --force to replace it")
        if not is_trace:
            raise OutputExistsError(
                f"{path} exists and is no trace, so --force does not replace it: choose another --out"
            )


def prepare_output(path: Path, *, force: bool = False) -> None:
    """Make `path` an empty folder for a trace.

    Raises:
        OutputExistsError: it is a file, or holds something and `force` is not set, or holds something that is no trace.
    """
    check_output(path, force=force)
    if path.exists() and any(path.iterdir()):
        shutil.rmtree(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordingError(f"cannot make the folder {path}: {error}") from error


class TraceWriter:
    """Writes one trace. Every method but `seal` and `abort` returns at once; none raises for what the disk does.

    A failure in the background (disk full, a bug) stops the recording: later calls do nothing, `failure` holds the
    error and `seal` raises it. The host is never made to fail.

    Args:
        path: an empty folder (see `prepare_output`).
        manifest: side, level and host must be set; the rest may be filled in until `seal`.
        max_bytes: stop recording once so many bytes of captures were taken; None for no limit.
        rank: number of this process among those that write into the same trace.
    """

    def __init__(self, path: Path, manifest: Manifest, *, max_bytes: int | None = None, rank: int = 0) -> None:
        if manifest.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {manifest.level!r}")
        self.path = path
        self.manifest = manifest
        self.failure: BaseException | None = None
        self._max_bytes = max_bytes
        self._rank = rank
        self._taken = 0
        self._pending = 0
        self._room = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._sites: dict[tuple[str, str, int], _SiteBuffer] = {}
        self._parts_of: dict[str, int] = defaultdict(int)
        self._tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._batches: dict[str, list[pa.RecordBatch]] = defaultdict(list)
        self._table_parts: dict[str, _Part] = {}
        manifest.write(path, OPEN_SEAL)
        self._thread = threading.Thread(target=self._run, name="eagle-trace-writer", daemon=True)
        self._thread.start()

    # ---- called by the recorder -------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """False once the byte budget is spent or writing failed. Ask before a forward, so that calls stay whole."""
        if self.failure is not None:
            return False
        if self._max_bytes is not None and self._taken >= self._max_bytes:
            self.manifest.stopped = "max-bytes"
            return False
        return True

    def put_rows(self, rows: Rows, training: Mapping[str, Array] | None = None) -> None:
        """Take the keys of one forward's draft rows, and columns of `schema.TRAINING` [T] that are known of them."""
        self._put("rows", (rows, training or {}), 64 * len(rows))

    def put_values(self, site: str, rows: Rows, values: Array) -> None:
        """Take the rows of one site: `values` [T, W] in the host's dtype, owned by the writer from now on."""
        if len(rows) != len(values) or values.ndim != 2:
            raise ValueError(f"{site}: {values.shape} values for {len(rows)} rows")
        if len(rows) and self.manifest.level != "shapes":
            self._put("values", (site, rows, values), values.nbytes)

    def put_topk(self, rows: Rows, draft_ids: Array, target_ids: Array, logits: Array, logprobs: Array) -> None:
        """Take the best ids of each row: four arrays [T, K], best first."""
        if len(rows):
            self._put("topk", (rows, draft_ids, target_ids, logits, logprobs), draft_ids.size * 32)

    def put_record(self, table: str, record: Mapping[str, Any]) -> None:
        """Take one row of a small table (prompts, calls, params, rounds, floors) as a mapping of its columns."""
        self._put("record", (table, dict(record)), 256)

    # ---- the end ----------------------------------------------------------------------------------------------

    def seal(self) -> Path:
        """Write what is left, then the manifest, and return the trace's path.

        Raises:
            RecordingError: something could not be written; the trace stays unsealed.
        """
        self._stop()
        if self.failure is not None:
            raise RecordingError(
                f"recording into {self.path} failed: {self.failure}; what was written stays there, unsealed"
            ) from self.failure
        self.manifest.write(self.path)
        (self.path / OPEN_SEAL).unlink()
        return self.path

    def abort(self, error: BaseException) -> None:
        """Stop writing because of `error`; what is whole stays on disk, unsealed."""
        if self.failure is None:
            self.failure = error
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # ---- the background thread --------------------------------------------------------------------------------

    def _put(self, kind: str, item: Any, size: int) -> None:
        if self.failure is not None:
            return
        self._taken += size
        with self._room:
            # one item larger than the whole budget must still get through
            self._room.wait_for(
                lambda: self._pending == 0 or self._pending + size <= QUEUE_BYTES or self.failure is not None
            )
            self._pending += size
        self._queue.put((kind, (item, size)))

    def _run(self) -> None:
        handlers: dict[str, Callable[[Any], None]] = {
            "rows": self._take_rows,
            "values": self._take_values,
            "topk": self._take_topk,
            "record": self._take_record,
        }
        while (message := self._queue.get()) is not None:
            kind, (item, size) = message
            if self.failure is None:
                self._guarded(lambda: handlers[kind](item))  # noqa: B023 (called at once)
            with self._room:
                self._pending -= size
                self._room.notify_all()
        self._guarded(self._finish)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (must never reach the host: kept and raised by seal)
            if self.failure is None:
                self.failure = error
            with self._room:
                self._room.notify_all()

    def _take_rows(self, item: tuple[Rows, Mapping[str, Array]]) -> None:
        rows, training = item
        columns = _key_columns(rows)
        for name, kind in TRAINING:
            columns[name] = pa.array(training[name], type=kind) if name in training else pa.nulls(len(rows), kind)
        self._add_batch("rows", pa.RecordBatch.from_arrays(list(columns.values()), schema=TABLES["rows"]))

    def _take_topk(self, item: tuple[Rows, Array, Array, Array, Array]) -> None:
        rows, draft_ids, target_ids, logits, logprobs = item
        k = draft_ids.shape[1]
        keys = _key_columns(rows.take(np.repeat(np.arange(len(rows)), k)))
        columns = {name: keys[name] for name in ("prompt_id", "root", "step", "path")}
        columns["rank"] = pa.array(np.tile(np.arange(k, dtype=np.int32), len(rows)))
        columns["draft_id"] = pa.array(draft_ids.reshape(-1).astype(np.int32))
        columns["target_id"] = pa.array(target_ids.reshape(-1).astype(np.int64))
        columns["logit"] = pa.array(logits.reshape(-1).astype(np.float32))
        columns["logprob"] = pa.array(logprobs.reshape(-1).astype(np.float32))
        self._add_batch("topk", pa.RecordBatch.from_arrays(list(columns.values()), schema=TABLES["topk"]))

    def _take_record(self, item: tuple[str, dict[str, Any]]) -> None:
        table, record = item
        self._tables[table].append(record)
        if len(self._tables[table]) >= TABLE_ROWS:
            self._flush_records(table)

    def _flush_records(self, table: str) -> None:
        if self._tables[table]:
            self._write_table(table, pa.Table.from_pylist(self._tables[table], schema=TABLES[table]))
            self._tables[table].clear()

    def _add_batch(self, table: str, batch: pa.RecordBatch) -> None:
        self._batches[table].append(batch)
        if sum(len(batch) for batch in self._batches[table]) >= TABLE_ROWS:
            self._flush_batches(table)

    def _flush_batches(self, table: str) -> None:
        if self._batches[table]:
            self._write_table(table, pa.Table.from_batches(self._batches[table]))
            self._batches[table].clear()

    def _write_table(self, table: str, data: pa.Table) -> None:
        part = self._table_parts.get(table)
        if part is None:
            path = self.path / f"{table}.parquet"
            part = self._table_parts[table] = _Part(path, pq.ParquetWriter(path, TABLES[table], compression="zstd"))
        part.writer.write_table(data)
        part.rows += len(data)

    def _take_values(self, item: tuple[str, Rows, Array]) -> None:
        site, rows, values = item
        key = (site, dtype_name(values), values.shape[1])
        buffer = self._sites.get(key)
        if buffer is None:
            level = "values" if self.manifest.level == "values" else "stats"
            folder = self.path / "values" / f"site={site}"
            buffer = self._sites[key] = _SiteBuffer(value_schema(*key, level), folder)
        buffer.rows.append(rows)
        buffer.values.append(values)
        buffer.bytes += values.nbytes
        if buffer.bytes >= ROW_GROUP_BYTES:
            self._flush_site(site, buffer)

    def _flush_site(self, site: str, buffer: _SiteBuffer) -> None:
        if not buffer.rows:
            return
        rows = Rows.concatenate(buffer.rows)
        values = np.ascontiguousarray(np.concatenate(buffer.values) if len(buffer.values) > 1 else buffer.values[0])
        buffer.rows.clear()
        buffer.values.clear()
        buffer.bytes = 0
        columns = _key_columns(rows)
        statistics = row_statistics(values)
        columns |= {name: pa.array(getattr(statistics, name)) for name in ("norm", "absmax", "mean", "nonfinite")}
        if "values" in buffer.schema.names:
            field_type = buffer.schema.field("values").type
            data = pa.py_buffer(values.view(np.uint8))
            columns["values"] = pa.FixedSizeBinaryArray.from_buffers(field_type, len(rows), [None, data])
        part = self._open_part(site, buffer)
        part.writer.write_table(
            pa.Table.from_arrays([columns[name] for name in buffer.schema.names], schema=buffer.schema),
            # a long prompt arrives in one piece: a reader should not need memory for all of it at once
            row_group_size=-(-len(rows) // max(1, values.nbytes // ROW_GROUP_BYTES)),
        )
        part.rows += len(rows)
        part.bytes += values.nbytes if "values" in buffer.schema.names else 64 * len(rows)
        if part.bytes >= min(FIRST_PART_BYTES << (2 * self._parts_of[site]), LARGEST_PART_BYTES):
            self._close(part)
            buffer.part = None

    def _open_part(self, site: str, buffer: _SiteBuffer) -> _Part:
        if buffer.part is None:
            buffer.folder.mkdir(parents=True, exist_ok=True)
            path = buffer.folder / f"rank{self._rank}-{self._parts_of[site]:05d}.parquet"
            self._parts_of[site] += 1
            plain = [name for name in buffer.schema.names if name != "values"]
            buffer.part = _Part(
                path,
                # values: no dictionary, no statistics, no compression, so that reading is a copy and nothing else
                pq.ParquetWriter(
                    path,
                    buffer.schema,
                    compression={**dict.fromkeys(_leaves(plain), "zstd"), "values": "none"},
                    use_dictionary=_leaves([name for name in plain if name not in ("norm", "absmax", "mean")]),
                    write_statistics=_leaves(plain),
                    data_page_size=ROW_GROUP_BYTES,
                ),
            )
        return buffer.part

    def _close(self, part: _Part) -> None:
        part.writer.close()
        name = part.path.relative_to(self.path).as_posix()
        self.manifest.files[name] = {"rows": part.rows, "bytes": part.path.stat().st_size}

    def _finish(self) -> None:
        if self.failure is None:
            for (site, _, _), buffer in self._sites.items():
                self._flush_site(site, buffer)
            for table in list(self._tables):
                self._flush_records(table)
            for table in list(self._batches):
                self._flush_batches(table)
        for part in list(self._open_parts()):
            # one file that cannot be closed must not leave the others without their footers
            self._guarded(lambda part=part: self._close(part))

    def _open_parts(self) -> Iterable[_Part]:
        yield from (buffer.part for buffer in self._sites.values() if buffer.part is not None)
        yield from self._table_parts.values()


def _leaves(names: Iterable[str]) -> list[str]:
    """Parquet leaf names of columns (a list's leaf has a name of its own)."""
    return ["path.list.element" if name == "path" else name for name in names]


def _key_columns(rows: Rows) -> dict[str, pa.Array]:
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
