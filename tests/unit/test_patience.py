"""No host waits for a disk longer than it was said to, and what is whole by then is kept."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import open_trace, writer
from eagle_trace.capture import Rows
from eagle_trace.errors import RecordingError, TraceUnsealedError, UsageError
from eagle_trace.gather import Memo
from eagle_trace.inbox import Inbox
from eagle_trace.manifest import Manifest
from eagle_trace.patience import parse_wait, within
from eagle_trace.store import Sink
from eagle_trace.streams import Part
from eagle_trace.writer import TOO_SLOW, TraceWriter
from tests.support.attached import wait_for
from tests.unit.test_partial import ROOT, SITES, WIDTH, assert_consistent, begin, put_call, record_of, rows_of


class Clock:
    """Seconds that pass when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def impatient(monkeypatch: pytest.MonkeyPatch, max_wait: float | None, stall: float = 10.0) -> tuple[Inbox, Clock]:
    clock = Clock()
    inbox = Inbox(100, max_wait, stall, clock)

    def wait(seconds: float | None = None) -> bool:
        clock.now += seconds or 0.0
        return False

    monkeypatch.setattr(inbox._changed, "wait", wait)
    return inbox, clock


def test_the_host_waits_no_longer_in_all_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, clock = impatient(monkeypatch, 0.2)
    for call in range(50):
        inbox.put("values", call, 30, call)
    assert inbox.slow
    assert inbox.waited == clock.now == pytest.approx(0.2)


def test_of_the_forward_that_waited_too_long_the_rest_is_taken_and_of_later_ones_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, _ = impatient(monkeypatch, 0.2)
    taken = [inbox.put("values", None, 30, call) for call in (0, 0, 1, 1, 1, 1, 2, 2, 1)]
    assert taken == [True] * 6 + [False, False, True]
    assert inbox.put("record", None, 1), "what belongs to no forward"


def test_waiting_elsewhere_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, clock = impatient(monkeypatch, 0.2)
    inbox.spend(0.15)
    for call in range(50):
        inbox.put("values", call, 30, call)
    assert clock.now == pytest.approx(0.05)
    assert inbox.waited == pytest.approx(0.2)


def test_where_nobody_else_waits_a_disk_that_moves_is_waited_for_and_one_that_hangs_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, clock = impatient(monkeypatch, None, stall=60.0)

    def wait(seconds: float | None = None) -> bool:
        clock.now += 50.0
        inbox._pending -= 30
        inbox._moved = clock.now
        return True

    monkeypatch.setattr(inbox._changed, "wait", wait)
    for call in range(50):
        inbox.put("values", call, 30, call)
    assert not inbox.slow
    assert clock.now > 1000
    inbox, clock = impatient(monkeypatch, None, stall=60.0)
    for call in range(50):
        inbox.put("values", call, 30, call)
    assert inbox.slow
    assert clock.now == pytest.approx(60.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes hang while this is not set."""
    opened = threading.Event()
    opened.set()
    real = Sink.write

    def write(self: Sink, data: bytes) -> int:
        opened.wait()
        return real(self, data)

    monkeypatch.setattr(Sink, "write", write)
    monkeypatch.setattr(writer, "QUEUE_BYTES", 64 << 10)
    yield opened
    opened.set()


def put_many(one: TraceWriter, first: int, calls: int) -> None:
    for call in range(first, first + calls):
        put_call(one, call, 100)


def test_a_disk_that_hangs_for_a_while_costs_the_host_its_share_and_the_trace_says_so(
    gate: threading.Event, tmp_path: Path
) -> None:
    one = begin(tmp_path / "t", max_wait=0.1)
    put_many(one, 0, 2)
    one.flush()
    gate.clear()
    one._saved_at = 0.0  # it is time to write
    put_many(one, 2, 100)
    assert not one.accepting
    gate.set()
    trace = open_trace(one.seal())
    assert trace.manifest.stopped == TOO_SLOW
    assert 0.1 <= trace.manifest.waited_seconds < writer.GUEST_STALL_SECONDS
    assert 2 <= assert_consistent(trace) < 20


def put_whole(one: TraceWriter, call: int, count: int = 10) -> None:
    rows, values = rows_of(call, count), np.full((count, WIDTH), call, np.float32)
    parts: list[Part] = [("rows", (rows, {})), *(("values", (site, rows, values, None)) for site in SITES)]
    parts.append(("record", ("calls", record_of(call, count))))
    one.put_late(lambda: parts, len(SITES) * values.nbytes, call=call)


def test_a_forward_that_is_put_together_is_taken_whole_or_not_at_all(gate: threading.Event, tmp_path: Path) -> None:
    one = begin(tmp_path / "t", max_wait=0.1)
    for call in range(2):
        put_whole(one, call)
    assert one.flush()
    gate.clear()
    one._saved_at = 0.0
    for call in range(2, 100):
        put_whole(one, call, 100)
    assert not one.accepting
    assert one.waited < writer.GUEST_STALL_SECONDS
    gate.set()
    assert 2 <= assert_consistent(open_trace(one.seal())) < 20


def test_what_fails_while_a_forward_is_made_ends_the_recording_and_not_the_host(tmp_path: Path) -> None:
    one = begin(tmp_path / "t", max_wait=0.1)
    put_whole(one, 0)
    one.put_late(lambda: [1 / 0], 10, call=1)  # type: ignore[list-item]
    put_whole(one, 2)
    with pytest.raises(RecordingError, match="division by zero"):
        one.seal()
    assert not one.accepting
    assert isinstance(one.failure, ZeroDivisionError)
    # what came before is kept
    assert assert_consistent(open_trace(tmp_path / "t", allow_partial=True)) == 1


def test_what_sites_share_is_made_once() -> None:
    made: list[int] = []

    def make(batches: Sequence[Rows]) -> int:
        made.append(len(batches))
        return len(made)

    memo = Memo(make)
    batches = [Rows.build(prompt_id=[0], root=[0], step=[0], token_id=[0], position=[0], call_id=n) for n in range(9)]
    assert [memo(batches), memo(list(batches)), memo(batches[:3]), memo(batches)] == [1, 1, 2, 1]
    for number in range(1, 9):
        memo(batches[number:])
    assert len(memo._made) <= 4
    memo.forget()
    assert memo(batches) == len(made)


def test_a_disk_that_hangs_for_good_is_left_behind(gate: threading.Event, tmp_path: Path) -> None:
    one = begin(tmp_path / "t")
    put_many(one, 0, 2)
    assert one.flush()
    gate.clear()
    one._saved_at = 0.0
    one._inbox._stall = 0.3
    put_many(one, 2, 100)
    with pytest.raises(RecordingError, match=TOO_SLOW):
        one.seal()
    one.abort(RuntimeError("again"))
    with pytest.raises(TraceUnsealedError):
        open_trace(tmp_path / "t")
    assert assert_consistent(open_trace(tmp_path / "t", allow_partial=True)) == 2
    # when the disk comes back, what was left behind says why it ended and holds nothing any more
    gate.set()
    one._thread.join(60)
    assert not one._thread.is_alive()
    assert TOO_SLOW in str(open_trace(tmp_path / "t", allow_partial=True).manifest.stopped)


def test_a_slow_disk_gets_what_it_can_take_and_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sink.write

    def write(self: Sink, data: bytes) -> int:
        time.sleep(0.03)
        return real(self, data)

    monkeypatch.setattr(Sink, "write", write)
    for name, value in (("HURRY_SECONDS", 0.2), ("FLUSH_SECONDS", 0.0)):
        monkeypatch.setattr(writer, name, value)
    one = begin(tmp_path / "t")
    put_many(one, 0, 100)
    trace = open_trace(one.seal())
    assert trace.manifest.stopped == TOO_SLOW
    assert 1 <= assert_consistent(trace) < 100


def test_a_folder_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(writer, "FOLDER_SECONDS", 0.2)
    with pytest.raises(RecordingError, match="does its disk hang"):
        TraceWriter(tmp_path / "t", Manifest("serve", "values", "x"), prepare=hang.wait)
    # who waited for this one would wait for ever
    monkeypatch.setattr(writer, "FOLDER_SECONDS", threading.TIMEOUT_MAX)
    one = TraceWriter(tmp_path / "t", Manifest("train", "values", "x"), prepare=hang.wait, background=True)
    put_call(one, 0)
    assert one.wait(0) is False
    hang.set()
    assert assert_consistent(open_trace(one.seal())) == 1


def test_writers_that_hang_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    said = []
    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(writer, "FOLDER_SECONDS", 0.05)
        for number in range(30):
            with pytest.raises(RecordingError) as refused:
                TraceWriter(tmp_path / f"{number}", Manifest("serve", "values", "x"), prepare=hang.wait)
            said.append(str(refused.value))
    assert ["does its disk hang" in words for words in said] == [True] * 4 + [False] * 26
    assert "4 earlier attempts still wait" in said[-1]
    assert threading.active_count() <= before + 4
    hang.set()
    wait_for(lambda: threading.active_count() <= before, threading.enumerate)
    TraceWriter(tmp_path / "after", Manifest("serve", "values", "x")).seal()


def test_nobody_but_its_owner_enters_the_folder_of_a_trace(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "made" / "a.trace", Manifest("serve", "values", "x")).seal()
    assert (tmp_path / "made" / "a.trace").stat().st_mode & 0o077 == 0
    shared = tmp_path / "shared.trace"
    shared.mkdir()
    shared.chmod(0o750)
    TraceWriter(shared, Manifest("serve", "values", "x")).seal()
    assert shared.stat().st_mode & 0o777 == 0o750, "a folder that is there keeps the rights that its owner gave it"


def test_attempts_that_hang_are_few(tmp_path: Path) -> None:
    hang = threading.Event()
    for _ in range(4):
        with pytest.raises(RecordingError, match="did not answer"):
            within(0.01, hang.wait, tmp_path)
    with pytest.raises(RecordingError, match="4 earlier attempts"):
        within(0.01, hang.wait, tmp_path)
    hang.set()
    for thread in threading.enumerate():
        if thread.name == "eagle-trace-disk":
            thread.join(60)
    assert within(60, lambda: 7, tmp_path) == 7
    with pytest.raises(ValueError, match="own error"):
        within(60, lambda: (_ for _ in ()).throw(ValueError("own error")), tmp_path)


def test_a_process_whose_disk_hangs_ends(tmp_path: Path) -> None:
    code = """
import os, sys, time
from tests.unit.test_partial import *
writer = begin(Path(sys.argv[1]))
for call in range(3):
    put_call(writer, call)
from eagle_trace.store import Sink
Sink.write = lambda self, data: time.sleep(10_000)
writer.close()
print(writer.wait(0.2), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t")],
        cwd=ROOT, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("0.5", 0.5), ("inf", float("inf"))])
def test_how_long_to_wait_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert parse_wait(text, "X") == seconds


@pytest.mark.parametrize("text", ["", "-1", "nan", "soon"])
def test_another_wait_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="X must be a number of seconds"):
        parse_wait(text, "X")


def test_a_sink_counts_its_writes() -> None:
    class Memory(Sink):
        def __init__(self) -> None:
            super().__init__(io.BytesIO())

    beats: list[int] = []
    sink = Memory()
    sink.beat = lambda: beats.append(sink.bytes)
    sink.write(b"abc")
    assert beats == [3]


def test_what_comes_waits_for_more_unless_it_presses() -> None:
    inbox = Inbox(1600, None, stall=60.0, linger=3600.0)
    taken: list[Any] = []

    def take() -> None:
        while (message := inbox.get(None)) is not None:
            taken.append(message[1])
            inbox.done(message[2])

    thread = threading.Thread(target=take, daemon=True)
    thread.start()

    def wait_until(count: int) -> None:
        while len(taken) < count:
            assert thread.is_alive()
            time.sleep(0.01)

    inbox.put("late", "a few bytes", 10)
    inbox.put("late", "more of them", 10)
    time.sleep(0.1)
    assert taken == [], "it waits for an hour"
    inbox.put("flush", "somebody waits for it", 0, pressing=True)
    wait_until(3)
    inbox.put("late", "much", 100)
    wait_until(4)
    inbox.put("late", "the last", 1)
    inbox.close()
    thread.join(60)
    assert len(taken) == 5


def test_a_host_that_waits_for_room_is_not_kept_waiting_for_more_to_come() -> None:
    inbox = Inbox(1600, 60.0, stall=60.0, linger=3600.0)
    thread = threading.Thread(target=lambda: [inbox.done(inbox.get(None)[2]) for _ in range(2)], daemon=True)  # type: ignore[index]
    thread.start()
    inbox.put("late", None, 50)
    inbox.put("late", None, 1590)
    thread.join(60)
    assert not thread.is_alive()
    assert not inbox.slow
    assert inbox.waited < 60.0
