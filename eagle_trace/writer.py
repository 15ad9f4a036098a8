"""The trace writer: takes captures from the host's thread, writes Parquet from its own.

The host's thread only appends to a queue. Rows are gathered into parts (`eagle_trace.parts`), and every few seconds,
between two forwards, all that was taken so far is put into whole files; then `manifest.partial.json` says which rows of
which file belong together. A host that is killed loses what came after that. Memory is bounded by the queue's budget,
one forward, and one row group per site.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from eagle_trace.capture import LEVELS, Array, Rows, Shard
from eagle_trace.errors import RecordingError, UsageError
from eagle_trace.gather import kept_bytes
from eagle_trace.inbox import Inbox, Message
from eagle_trace.manifest import Manifest
from eagle_trace.output import check_output, prepare_output, remove_empty
from eagle_trace.patience import FOLDER_SECONDS, MAX_WAIT, leave_behind, refuse_one_more
from eagle_trace.seal import Seal
from eagle_trace.sketch import Reduced
from eagle_trace.store import Place, open_store, reason
from eagle_trace.streams import Part, Streams

__all__ = ["Shard", "TraceWriter", "check_output", "prepare_output", "remove_empty"]

QUEUE_BYTES = 256 << 20
#: how old what is not on disk yet may get
FLUSH_SECONDS = 5.0
#: how long what is taken waits for more: two threads of Python that take turns cost the host more than the work itself
LINGER_SECONDS = 3.0
#: a call that was handed over in part is waited for: until the host has been silent for so long, or has not been
#: silent for so long
_QUIET_SECONDS, _CALL_SECONDS = 0.25, 2.0
#: a disk that takes nothing for so long hangs [s]: where nobody else waits for the host, and where others do
STALL_SECONDS, GUEST_STALL_SECONDS = 60.0, 10.0
#: in a host that others wait for: when what is not written yet is given up, and when the seal is [s]
HURRY_SECONDS, SEAL_SECONDS = 20.0, 60.0
#: why a recording ended that would have made its host wait
TOO_SLOW = "the disk was too slow"
LEFT_OUT = "the disk was too slow to take the last forwards: they are left out"

#: what the keys of a row take
ROW_BYTES = 64

#: prompts and calls of data-parallel rank d are numbered from d times this on
DP_STRIDE = 1 << 20


class TraceWriter:
    """Writes one trace, or one rank's share of it. No method raises for what the disk does, but for `seal`.

    The host never waits for the disk longer than `max_wait` seconds in all. When that is used up, the recording ends
    with the forward that is being handed over (`accepting` is False, the trace says that it was `TOO_SLOW`). A failure
    in the background (disk full, a bug) stops it likewise: later calls do nothing, `failure` holds the error and `seal`
    raises it. A disk that hangs is left behind with the thread that waits for it. The host is never made to fail.

    Several ranks may write into one folder without knowing of each other. The manifest of each says which `rank` of how
    many `ranks` it is. Ranks of one ``dp_rank`` compute the same rows: the one of ``tp_rank`` 0 writes all, the others
    only values and parameters (whatever else they are given is dropped). Ranks of another ``dp_rank`` have rows of
    their own; their prompts and calls are renumbered by multiples of `DP_STRIDE`, so that numbers mean one thing.

    Args:
        path: an empty folder, or the URL of one (see `prepare_output`).
        manifest: side, level and host must be set; the rest may be filled in until `seal`.
        max_bytes: stop recording once so many bytes of captures were taken; None for no limit.
        max_wait: how long the host may wait for the disk, in all [s]; None where nobody else waits for the host.
        prepare: what to do before the folder is written to, in the writer's thread.
        background: do not wait until the folder is open; what stands in the way later is a `failure`.

    Raises:
        UsageError: no such level, or ranks that make no sense.
        OutputExistsError: somebody records there, or recorded there.
        RecordingError: the folder cannot be written, or does not answer, or earlier traces still wait for their disk.
    """

    def __init__(
        self,
        path: Place,
        manifest: Manifest,
        *,
        max_bytes: int | None = None,
        max_wait: float | None = MAX_WAIT,
        prepare: Callable[[], None] | None = None,
        background: bool = False,
    ) -> None:
        _check(manifest)
        refuse_one_more(path)
        self._store = open_store(path)
        self.path = self._store.place
        self.manifest = manifest
        self.failure: BaseException | None = None
        self._max_bytes = max_bytes
        self._guest = max_wait is not None and max_wait < float("inf")
        self._first_id = manifest.dp_rank * DP_STRIDE
        self._taken = 0
        stall = GUEST_STALL_SECONDS if self._guest else STALL_SECONDS
        self._inbox = Inbox(QUEUE_BYTES, max_wait, stall, linger=min(LINGER_SECONDS, FLUSH_SECONDS))
        self._seal = Seal(self._store, manifest)
        self._streams = Streams(self._store, manifest, self._first_id, self._inbox.beat)
        self._call: int | None = None
        self._highest = -1
        self._hurry_at: float | None = None
        self._aborted = False
        self._saved_at = time.monotonic()
        self._dirty = False
        self._prepare = prepare
        self._mine = False
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagle-trace-writer", daemon=True)
        self._thread.start()
        started = time.monotonic()
        if self._opened.wait(min(max_wait or 0.0, FOLDER_SECONDS) if background else FOLDER_SECONDS):
            if self.failure is not None:
                raise self.failure
        elif not background:
            self._abandon(RecordingError(f"{path} did not answer within {FOLDER_SECONDS:g} s: does its disk hang?"))
            raise RecordingError(str(self.failure))
        if background:
            self._inbox.spend(time.monotonic() - started)

    def _open(self) -> None:
        if self._prepare is not None:
            self._prepare()
            if self.failure is not None:  # nobody waits for the folder any more: it may be another's by now
                return
        self._seal.claim()
        self._mine = True

    # ---- called by the recorder -------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """False once the budget of bytes or of waiting is spent, or writing failed. Ask before a forward."""
        if self.failure is not None:
            return False
        if self._inbox.slow:
            self.manifest.stopped = self.manifest.stopped or TOO_SLOW
            return False
        if self._max_bytes is not None and self._taken >= self._max_bytes:
            self.manifest.stopped = "max-bytes"
            return False
        return True

    @property
    def patience(self) -> float:
        """How long the host may still wait for the disk in this recording [s]."""
        return self._inbox.patience

    @property
    def waited(self) -> float:
        """How long the host has waited for the disk in this recording so far, in all [s]."""
        return round(self._inbox.waited, 3)

    def spend(self, seconds: float) -> None:
        """Count `seconds` that the host has waited for the disk of its own accord."""
        self._inbox.spend(seconds)

    def put_rows(self, rows: Rows, training: Mapping[str, Array] | None = None) -> None:
        """Take the keys of one forward's draft rows, and columns of `schema.TRAINING` [T] that are known of them."""
        if self.failure is None:
            # keys count as well, on every rank: at level ``shapes`` they are all there is
            self._taken += ROW_BYTES * len(rows)
        if len(rows):
            self._put("rows", (rows, training or {}), ROW_BYTES * len(rows))

    def put_values(self, site: str, rows: Rows, values: Array | Reduced, shard: Shard | None = None) -> None:
        """Take the rows of one site: `values` [T, W] in the host's dtype, owned by the writer from now on.

        Below level ``values`` they may also come reduced (`eagle_trace.recording.arrays.capture_rows`). `shard` says
        which part of the columns they are; None if this rank holds all of them.
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
            self._put("values", (site, rows, values, shard), values.nbytes)

    def put_topk(self, rows: Rows, draft_ids: Array, target_ids: Array, logits: Array, logprobs: Array) -> None:
        """Take the best ids of each row: four arrays [T, K], best first."""
        if len(rows):
            self._put("topk", (rows, draft_ids, target_ids, logits, logprobs), draft_ids.size * 32)

    def put_record(self, table: str, record: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Take one row of a small table (prompts, calls, params, rounds, floors) as a mapping of its columns.

        A prompt may be given more than once, as more of it is known: the last row of a `prompt_id` counts. A row that
        takes time to make is given as a function, which the writer's thread calls.
        """
        self._put("record", (table, record if callable(record) else dict(record)), 256)

    def put_late(
        self, make: Callable[[], Iterable[Part]], size: int, *, call: int | None = None, kept: int = 0
    ) -> None:
        """Take what `make` gives when the writer's thread calls it: all that belongs together, such as a forward.

        All of it is taken, or nothing. A part is what is put otherwise: ``("rows", (rows, training))``,
        ``("values", (site, rows, values, shard))``, ``("topk", (rows, draft_ids, target_ids, logits, logprobs))`` or
        ``("record", (table, record))``. What `make` raises ends the recording.

        Args:
            make: called once.
            size: bytes held until it is written.
            call: the forward it belongs to, if to one; numbers only grow.
            kept: bytes of it that count for the budget.
        """
        if self.failure is None:
            self._taken += kept
            self._inbox.put("late", make, size, None if call is None else call + self._first_id)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was taken so far is in whole files: whether it is, within `timeout` seconds."""
        done = threading.Event()
        self._inbox.put("flush", done, 0, pressing=True)
        give_up = None if timeout is None else time.monotonic() + timeout
        while not done.wait(0.05):
            if not self._thread.is_alive() or (give_up is not None and time.monotonic() > give_up):
                return False
        return self.failure is None

    # ---- the end ----------------------------------------------------------------------------------------------

    def close(self, stopped: str | None = None) -> None:
        """Take nothing more: the writer's thread writes what is left, then the seal. Returns at once.

        Of a guest's recording that is not written after `HURRY_SECONDS`, what is whole by then is sealed.

        Args:
            stopped: why the recording ended before it was done, in a few words; None if it was done.
        """
        if self._inbox.slow and self.manifest.stopped is None:
            self.manifest.stopped = TOO_SLOW
        elif stopped is not None:
            self.manifest.stopped = stopped
        if self._guest and self._hurry_at is None:
            self._hurry_at = time.monotonic() + HURRY_SECONDS
        self._inbox.close()

    def wait(self, seconds: float | None, stall: float | None = None) -> bool:
        """Whether, after `close`, the trace is sealed or has failed within `seconds`.

        Args:
            seconds: how long to wait; None for as long as something is being written.
            stall: give up when nothing is for so many seconds; None for what the writer takes for a disk that hangs.
        """
        return self._inbox.wait_until_finished(seconds, stall)

    def seal(self, stopped: str | None = None) -> Place:
        """Write what is left, then the manifest, and return the trace's path.

        Args:
            stopped: see `close`.

        Raises:
            RecordingError: something could not be written, or not in time; the trace stays unsealed.
        """
        self.close(stopped)
        seconds = SEAL_SECONDS if self._guest else None
        if not self.wait(seconds):
            self._abandon(RecordingError(f"{TOO_SLOW} or hangs: it did not take in time what was left to write"))
        if self.failure is not None:
            raise RecordingError(
                f"recording into {self.path} failed: {reason(self.failure)}; "
                "what was whole before stays there, marked as partial"
            ) from self.failure
        return self.path

    def abort(self, error: BaseException) -> None:
        """Stop recording because of `error`; what was taken so far stays on disk, unsealed."""
        self.manifest.stopped, self.manifest.recorder = reason(error), ""
        self._aborted = True
        self.close()
        if not self.wait(SEAL_SECONDS if self._guest else None):
            self._abandon(error)
        if self.failure is None:
            self.failure = error

    def _abandon(self, error: BaseException) -> None:
        """Leave the thread to its disk: what waits is forgotten, so that it holds no memory."""
        if self.failure is None:
            self.failure = error
        self._inbox.drop()
        leave_behind(self._thread)

    # ---- the background thread --------------------------------------------------------------------------------

    def _put(self, kind: str, item: Any, size: int) -> None:
        if self.failure is None:
            self._inbox.put(kind, item, size, self._call_of(kind, item))

    def _call_of(self, kind: str, item: Any) -> int | None:
        """The forward that what was handed over belongs to, if to one."""
        if kind == "record":
            call = None if callable(item[1]) else item[1].get("call_id")
            return None if call is None else int(call) + self._first_id
        rows = item[1] if kind == "values" else item[0]
        return int(rows.call_id[0]) + self._first_id

    def _run(self) -> None:
        try:
            try:
                self._open()
                if self.failure is None:
                    self._opened.set()
                    self._work()
            except Exception as error:  # noqa: BLE001 (must never reach the host: kept and raised by seal)
                self.failure = error
                self._inbox.drop()
            self._streams.discard()
            if self.failure is not None and self._mine:
                self._seal.note(self.failure, self.waited)
        finally:
            self._opened.set()
            self._inbox.finish()

    def _work(self) -> None:
        """Take what comes until there is nothing more, then seal it; what fails ends the recording."""
        while self.failure is None and (message := self._next()) is not None:
            kind, item, size, call = message
            if kind == "flush":
                self._save()
                item.set()
            elif not self._too_late(call):
                self._save_if_due(call)
                self._dirty = True
                for part in self._made(item) if kind == "late" else [(kind, item)]:
                    self._streams.add(*part)
            self._inbox.done(size)
        if self.failure is None:
            self._save()
        if self.failure is None and not self._aborted:
            self._seal.close()

    def _next(self) -> Message | None:
        """What comes next, None after the last; when the host has been silent for a while, all before it is saved."""
        while True:
            due = self._saved_at + FLUSH_SECONDS
            try:
                return self._inbox.get(max(_QUIET_SECONDS, due - time.monotonic()) if self._dirty else None)
            except TimeoutError:
                self._save()

    def _save_if_due(self, call: int | None) -> None:
        """Save what came before forward `call`, if that is old: between two forwards, unless one is not handed over."""
        late = time.monotonic() - self._saved_at - FLUSH_SECONDS
        if self._dirty and late >= 0 and (late >= _CALL_SECONDS or call not in (None, self._call)):
            self._save()
        self._call = self._call if call is None else call

    def _too_late(self, call: int | None) -> bool:
        """Whether a forward is left out, so that those before it are sealed in time."""
        if call is None or call <= self._highest:
            return False
        if self._hurry_at is not None and time.monotonic() > self._hurry_at:
            self.manifest.stopped = self.manifest.stopped or TOO_SLOW
            if LEFT_OUT not in self.manifest.warnings:
                self.manifest.warnings.append(LEFT_OUT)
            return True
        self._highest = call
        return False

    def _made(self, make: Callable[[], Iterable[Part]]) -> list[Part]:
        """The parts of a forward; where they cannot be made, what was taken before is kept."""
        try:
            return list(make())
        except Exception:
            self._save()
            raise

    def _save(self) -> None:
        """Put all that was taken into whole files, and say in the open seal that they belong together."""
        self._streams.save()
        self._saved_at = time.monotonic()
        self._dirty = False
        self._seal.update(self.waited)


def _check(manifest: Manifest) -> None:
    if manifest.level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {manifest.level!r}")
    if not 0 <= manifest.rank < manifest.ranks:
        raise UsageError(f"rank {manifest.rank} is not one of {manifest.ranks} ranks (0 is the first)")
    if not 0 <= manifest.dp_rank < 2**31 // DP_STRIDE:
        raise UsageError(f"dp_rank {manifest.dp_rank} is not one of 0 to {2**31 // DP_STRIDE - 1}")
    if manifest.rank == 0 and (manifest.tp_rank or manifest.dp_rank):
        raise UsageError("rank 0 is the one of tp_rank 0 and dp_rank 0")
