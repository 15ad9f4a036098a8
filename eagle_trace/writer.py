"""The trace writer: takes captures from the host's thread, writes Parquet from its own.

The host's thread only appends to a queue. Rows are gathered into parts (`eagle_trace.parts`), and every few seconds,
between two forwards, all that was taken so far is put into whole files; then `manifest.partial.json` says which rows of
which file belong together. A host that is killed loses what came after that. Memory is bounded by the queue's budget
plus one row group a site.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from eagle_trace.capture import LEVELS, Array, Rows, Shard
from eagle_trace.errors import OutputExistsError, RecordingError, TraceError, UsageError
from eagle_trace.gather import BLOBS, Gather, Kept, kept_bytes, kind_of, value_columns
from eagle_trace.manifest import Manifest, open_seal_name, read_manifest, seal_name
from eagle_trace.output import check_output, prepare_output, remove_empty
from eagle_trace.parts import Numbers, PartStream, leaves
from eagle_trace.schema import TABLES, value_schema
from eagle_trace.sketch import Reduced
from eagle_trace.store import Place, join, open_store, reason
from eagle_trace.tables import key_columns, rows_table, topk_table

__all__ = ["Shard", "TraceWriter", "check_output", "prepare_output", "remove_empty"]

ROW_GROUP_BYTES = 2 << 20
#: the same where no values are kept: rows are small there
REDUCED_GROUP_BYTES = 512 << 10
QUEUE_BYTES = 256 << 20
TABLE_ROWS = 1 << 14
#: how old what is not on disk yet may get
FLUSH_SECONDS = 5.0
#: a call that was handed over in part is waited for: until the host has been silent for so long, or has not been
#: silent for so long
_QUIET_SECONDS, _CALL_SECONDS = 0.25, 2.0

Make = Callable[[list[Any]], pa.Table]

#: prompts and calls of data-parallel rank d are numbered from d times this on
DP_STRIDE = 1 << 20


class _SiteStream:
    """Rows of one site on their way to its parts: reduced where the level keeps no values, then written."""

    def __init__(self, gather: Gather, parts: PartStream) -> None:
        self._gather = gather
        self._parts = parts

    def add(self, rows: Rows, values: Array | Reduced) -> None:
        for kept, size in self._gather.add(rows, values):
            self._parts.add(kept, size)

    def save(self) -> None:
        for kept, size in self._gather.drain():
            self._parts.add(kept, size)
        self._parts.save()

    def discard(self) -> None:
        self._parts.discard()


class TraceWriter:
    """Writes one trace, or one rank's share of it. Every method but `flush`, `seal` and `abort` returns at once; none
    raises for what the disk does.

    A failure in the background (disk full, a bug) stops the recording: later calls do nothing, `failure` holds the
    error and `seal` raises it. The host is never made to fail.

    Several ranks may write into one folder without knowing of each other. The manifest of each says which `rank` of how
    many `ranks` it is. Ranks of one ``dp_rank`` compute the same rows: the one of ``tp_rank`` 0 writes all, the others
    only values and parameters (whatever else they are given is dropped). Ranks of another ``dp_rank`` have rows of
    their own; their prompts and calls are renumbered by multiples of `DP_STRIDE`, so that numbers mean one thing.

    Args:
        path: an empty folder, or the URL of one (see `prepare_output`).
        manifest: side, level and host must be set; the rest may be filled in until `seal`.
        max_bytes: stop recording once so many bytes of captures were taken; None for no limit.

    Raises:
        UsageError: no such level, or ranks that make no sense.
        OutputExistsError: somebody records there, or recorded there.
        RecordingError: the folder cannot be written.
    """

    def __init__(self, path: Place, manifest: Manifest, *, max_bytes: int | None = None) -> None:
        _check(manifest)
        self._store = open_store(path)
        self.path = self._store.place
        self.manifest = manifest
        self.failure: BaseException | None = None
        self._max_bytes = max_bytes
        self._first_id = manifest.dp_rank * DP_STRIDE
        self._taken = 0
        self._pending = 0
        self._room = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[str, Any, int] | None] = queue.SimpleQueue()
        self._tables: dict[str, PartStream] = {}
        self._sites: dict[tuple[str, str, int, Shard | None], _SiteStream] = {}
        self._numbers: dict[str, Numbers] = defaultdict(Numbers)
        self._call: int | None = None
        self._saved_at = time.monotonic()
        self._dirty = False
        self._open()
        self._thread = threading.Thread(target=self._run, name="eagle-trace-writer", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        manifest, store = self.manifest, self._store
        seal = seal_name(manifest.rank)
        taken = f"{join(store.place, seal)} is there or being made: two recorders cannot write one trace"
        manifest.recorder = f"{socket.gethostname()}:{os.getpid()}"
        manifest.recording = secrets.token_hex(8)
        try:
            store.make()
            if store.exists(seal):
                raise OutputExistsError(taken)
            store.create(open_seal_name(manifest.rank), manifest.to_bytes())
        except FileExistsError as error:
            raise OutputExistsError(taken) from error
        except OSError as error:
            raise RecordingError(f"cannot write into {store.place}: {reason(error)}") from error

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

    @property
    def _leads(self) -> bool:
        """Whether this rank writes what all ranks of its group know."""
        return self.manifest.tp_rank == 0

    def put_rows(self, rows: Rows, training: Mapping[str, Array] | None = None) -> None:
        """Take the keys of one forward's draft rows, and columns of `schema.TRAINING` [T] that are known of them."""
        if len(rows) and self._leads:
            self._put("rows", (self._numbered(rows), training or {}), 64 * len(rows))

    def put_values(self, site: str, rows: Rows, values: Array | Reduced, shard: Shard | None = None) -> None:
        """Take the rows of one site: `values` [T, W] in the host's dtype, owned by the writer from now on.

        Below level ``values`` they may also come reduced (`eagle_trace.recorder.capture_rows`). `shard` says which part
        of the columns they are; None if this rank holds all of them.
        """
        if len(rows) != len(values) or not (isinstance(values, Reduced) or values.ndim == 2):
            raise ValueError(f"{site}: {len(values)} rows of values for {len(rows)} rows")
        level = self.manifest.level
        if level == "values" and isinstance(values, Reduced):
            raise ValueError(f"{site}: level values needs the rows themselves")
        if shard is not None and not 0 <= shard.index < shard.count:
            raise ValueError(f"{site}: there is no part {shard.index} of {shard.count}")
        if len(rows) and level != "shapes":
            if self.failure is None:
                # of whole rows, and of nothing that only one rank writes: ranks must stop before the same call
                self._taken += kept_bytes(values, level, shard) * (shard.count if shard else 1)
            self._put("values", (site, self._numbered(rows), values, shard), values.nbytes)

    def put_topk(self, rows: Rows, draft_ids: Array, target_ids: Array, logits: Array, logprobs: Array) -> None:
        """Take the best ids of each row: four arrays [T, K], best first."""
        if len(rows) and self._leads:
            size = draft_ids.size * 32
            self._put("topk", (self._numbered(rows), draft_ids, target_ids, logits, logprobs), size)

    def put_record(self, table: str, record: Mapping[str, Any]) -> None:
        """Take one row of a small table (prompts, calls, params, rounds, floors) as a mapping of its columns.

        A prompt may be given more than once, as more of it is known: the last row of a `prompt_id` counts.
        """
        if self._leads or table == "params":
            numbers = {
                name: record[name] + self._first_id for name in ("prompt_id", "call_id") if record.get(name) is not None
            }
            self._put("record", (table, dict(record) | numbers), 256)

    def _numbered(self, rows: Rows) -> Rows:
        if not self._first_id:
            return rows
        return replace(rows, prompt_id=rows.prompt_id + self._first_id, call_id=rows.call_id + self._first_id)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was taken so far is in whole files: whether it is, within `timeout` seconds."""
        done = threading.Event()
        self._queue.put(("flush", done, 0))
        give_up = None if timeout is None else time.monotonic() + timeout
        while not done.wait(0.05):
            if not self._thread.is_alive() or (give_up is not None and time.monotonic() > give_up):
                return False
        return self.failure is None

    # ---- the end ----------------------------------------------------------------------------------------------

    def seal(self, stopped: str | None = None) -> Place:
        """Write what is left, then the manifest, and return the trace's path.

        Args:
            stopped: why the recording ended before it was done, in a few words; None if it was done.

        Raises:
            RecordingError: something could not be written; the trace stays unsealed.
        """
        if stopped is not None:
            self.manifest.stopped = stopped
        self._stop()
        if self.failure is None:
            self._guarded(self._write_seal)
        if self.failure is not None:
            raise RecordingError(
                f"recording into {self.path} failed: {reason(self.failure)}; "
                "what was whole before stays there, marked as partial"
            ) from self.failure
        return self.path

    def _write_seal(self) -> None:
        manifest, store = self.manifest, self._store
        manifest.recorder = ""
        try:
            if isinstance(store.place, Path):
                for name, facts in manifest.files.items():
                    if (store.place / name).stat().st_size != facts["bytes"]:
                        raise RecordingError(f"{store.place / name} was changed by somebody else")
            manifest.write(store, seal_name(manifest.rank))
            store.remove(open_seal_name(manifest.rank))
        except OSError as error:
            raise RecordingError(f"cannot seal {store.place}: {reason(error)}") from error

    def abort(self, error: BaseException) -> None:
        """Stop recording because of `error`; what was taken so far stays on disk, unsealed."""
        self.manifest.stopped, self.manifest.recorder = reason(error), ""
        self._stop()
        if self.failure is None:
            self.failure = error

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # ---- the background thread --------------------------------------------------------------------------------

    def _put(self, kind: str, item: Any, size: int) -> None:
        if self.failure is not None:
            return
        with self._room:
            # one item larger than the whole budget must still get through
            self._room.wait_for(
                lambda: self._pending == 0 or self._pending + size <= QUEUE_BYTES or self.failure is not None
            )
            self._pending += size
        self._queue.put((kind, item, size))

    def _run(self) -> None:
        while True:
            due = self._saved_at + FLUSH_SECONDS
            try:
                wait = max(_QUIET_SECONDS, due - time.monotonic()) if self._dirty else None
                message = self._queue.get(timeout=wait)
            except queue.Empty:
                self._guarded(self._save)
                continue
            if message is None:
                break
            kind, item, size = message
            self._guarded(lambda: self._take(kind, item, due))  # noqa: B023 (called at once)
            if kind == "flush":
                item.set()
            with self._room:
                self._pending -= size
                self._room.notify_all()
        self._guarded(self._save)
        for stream in self._all_streams():
            stream.discard()
        if self.failure is not None:
            # what was saved last stays as it is, but says why it ends there and that nobody is at work any more
            with contextlib.suppress(OSError, TraceError):
                saved = read_manifest(self._store, open_seal_name(self.manifest.rank))
                saved.recorder, saved.stopped = "", reason(self.failure)
                saved.write(self._store, open_seal_name(saved.rank))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 (must never reach the host: kept and raised by seal)
            self.failure = error
            with self._room:
                self._room.notify_all()

    def _take(self, kind: str, item: Any, due: float) -> None:
        if kind == "flush":
            self._save()
            return
        late, call = time.monotonic() - due, _call_of(kind, item)
        if self._dirty and late >= 0 and (late >= _CALL_SECONDS or call not in (None, self._call)):
            self._save()
        self._call = self._call if call is None else call
        self._dirty = True
        if kind == "rows":
            self._table("rows", rows_table).add(item, len(item[0]))
        elif kind == "topk":
            self._table("topk", topk_table).add(item, item[1].size)
        elif kind == "record":
            self._take_record(*item)
        else:
            self._take_values(*item)

    def _save(self) -> None:
        """Put all that was taken into whole files, and say in the open seal that they belong together."""
        for stream in self._all_streams():
            stream.save()
        self._saved_at = time.monotonic()
        self._dirty = False
        self.manifest.flushed = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self.manifest.write(self._store, open_seal_name(self.manifest.rank))
        except OSError as error:
            raise RecordingError(f"cannot write into {self.path}: {reason(error)}") from error

    def _take_record(self, table: str, record: dict[str, Any]) -> None:
        schema = TABLES[table]
        self._table(table, lambda records: pa.Table.from_pylist(records, schema=schema)).add(record, 1)

    def _take_values(self, site: str, rows: Rows, values: Array | Reduced, shard: Shard | None) -> None:
        key = (site, *kind_of(values), shard)
        stream = self._sites.get(key)
        if stream is None:
            level = self.manifest.level
            schema = value_schema(*key[:3], level, shard)
            made = partial(_site_table, schema)
            group = ROW_GROUP_BYTES if level == "values" else REDUCED_GROUP_BYTES
            parts = self._stream(f"values/site={site}", schema, made, _value_options(schema), group)
            stream = self._sites[key] = _SiteStream(Gather(level, shard), parts)
        stream.add(rows, values)

    def _table(self, table: str, make: Make) -> PartStream:
        stream = self._tables.get(table)
        if stream is None:
            options = {"compression": "zstd"}
            stream = self._stream(f"{table}.parquet", TABLES[table], make, options, TABLE_ROWS)
            self._tables[table] = stream
        return stream

    def _all_streams(self) -> list[PartStream | _SiteStream]:
        return [*self._tables.values(), *self._sites.values()]

    def _stream(self, folder: str, schema: pa.Schema, make: Make, options: dict[str, Any], group: int) -> PartStream:
        prefix = f"{folder}/rank{self.manifest.rank}"
        manifest = self.manifest
        return PartStream(
            self._store, prefix, self._numbers[prefix], schema, make, options, group, manifest.files,
            manifest.checksums, manifest.recording,
        )  # fmt: skip


def _check(manifest: Manifest) -> None:
    if manifest.level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {manifest.level!r}")
    if not 0 <= manifest.rank < manifest.ranks:
        raise UsageError(f"rank {manifest.rank} is not one of {manifest.ranks} ranks (0 is the first)")
    if not 0 <= manifest.dp_rank < 2**31 // DP_STRIDE:
        raise UsageError(f"dp_rank {manifest.dp_rank} is not one of 0 to {2**31 // DP_STRIDE - 1}")
    if manifest.rank == 0 and (manifest.tp_rank or manifest.dp_rank):
        raise UsageError("rank 0 is the one of tp_rank 0 and dp_rank 0")


def _call_of(kind: str, item: Any) -> int | None:
    """The forward that what was handed over belongs to, if to one."""
    if kind == "record":
        call = item[1].get("call_id")
        return None if call is None else int(call)
    rows = item[1] if kind == "values" else item[0]
    return int(rows.call_id[0])


def _site_table(schema: pa.Schema, items: Sequence[Kept]) -> pa.Table:
    """Rows of one site as a table: keys, statistics, and the bytes as the level keeps them."""
    columns = key_columns(Rows.concatenate([rows for rows, _ in items]))
    columns |= value_columns(schema, [values for _, values in items])
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


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
