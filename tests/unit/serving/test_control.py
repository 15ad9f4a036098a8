"""Starting and ending recordings from SGLang's main process; the recorders are stand-ins that talk as they do."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import HostError, OutputExistsError, RecordingError, UsageError
from eagle_trace_serving import control as module
from eagle_trace_serving.control import Control
from eagle_trace_serving.environment import SESSION
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.session import GREETING_SECONDS, connect
from eagle_trace_sglang.host import HOST
from tests.support.attached import wait_for

#: how long what must come is waited for, on a machine that has much else to do [s]
LONG = 120.0
FACTS = Facts(
    host="sglang", packages={}, target="org/target", draft="org/draft", device="cpu", dtype="float32", architecture="x",
    settings={"algorithm": "EAGLE3", "steps": 3, "topk": 1, "draft_tokens": 4, "prefix_cache": True},
)  # fmt: skip


class Rank:
    """A recorder that does as it is told, and remembers what that was."""

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        begins: bool = True,
        rows: int = 1,
        deaf: str = "",
        stops: str | None = None,
    ) -> None:
        connection = connect("recorder", SESSION)
        assert connection is not None
        self.connection = connection
        self.begins, self.rows, self.deaf, self.stops = begins, rows, deaf, stops
        self.orders: list[tuple[Any, ...]] = []
        self.number = 0
        connection.send(("armed", replace(FACTS, rank=rank, ranks=ranks)))
        threading.Thread(target=self._obey, daemon=True).start()

    def counts(self) -> dict[str, Any]:
        return {
            "requests": 1,
            "ended": 1,
            "calls": 7,
            "rows": self.rows,
            "bytes": 10,
            "files": 2,
            "stopped": self.stops,
        }

    @property
    def told(self) -> list[str]:
        """Names of the orders, without the questions."""
        return [name for name, *_ in self.orders if name != "counts"]

    def say(self, name: str, *message: Any, number: int | None = None) -> None:
        self.connection.send((name, self.number if number is None else number, *message))

    def die(self) -> None:
        """End as a process that is killed does: what is sent is heard, and then nothing."""
        socket.socket(fileno=os.dup(self.connection.fileno())).shutdown(socket.SHUT_RDWR)

    def _obey(self) -> None:
        while True:
            try:
                name, number, *arguments = self.connection.recv()
            except (EOFError, OSError):
                return
            self.orders.append((name, *arguments))
            if name == self.deaf:
                continue
            if name == "begin":
                self.number = number
                self.say("recording") if self.begins else self.say("failed", "no room", "", 0.0)
                if self.stops:
                    self.say("sealed", self.counts())
            elif name == "finish":
                self.say("sealed", self.counts(), number=number)
            else:
                self.say("counts", {"requests": 1, "ended": 0, "calls": 3})


class Clock:
    """Seconds that pass when a test says so, and are looked at all the time."""

    def __init__(self) -> None:
        self.now, self._looked = 0.0, threading.Semaphore(0)

    def monotonic(self) -> float:
        now = self.now
        self._looked.release()
        return now

    def pass_by(self, seconds: float) -> None:
        """Let time pass that ends nothing, and whoever watches see that."""
        self.now += seconds
        while self._looked.acquire(blocking=False):
            pass
        for _ in range(3):  # of the first look the answer may be one of before
            assert self._looked.acquire(timeout=LONG), "nobody looks at the clock"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    return made


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    made = Control(HOST)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close(2)


def order(tmp_path: Path, **options: Any) -> Order:
    return replace(Order(str(tmp_path / "s.trace"), alone=False), **options)


def test_a_recording_begins_and_ends_on_every_rank(control: Control, tmp_path: Path) -> None:
    ranks = [Rank(1, 2), Rank(0, 2)]
    control.start(order(tmp_path))
    assert control.status()["state"] == "recording"
    assert control.status()["calls"] == 3
    assert control.finish({"a": 1}) == str(tmp_path / "s.trace")
    assert control.status()["last"]["outcome"] == "sealed"
    assert [rank.told for rank in ranks] == [["begin", "finish"]] * 2


def test_a_recording_that_has_not_begun_everywhere_is_starting(control: Control, tmp_path: Path) -> None:
    ranks = [Rank(0, 2), Rank(1, 2, deaf="begin")]
    starting = threading.Thread(target=control.start, args=(order(tmp_path),))
    starting.start()
    wait_for(lambda: all("begin" in rank.told for rank in ranks), lambda: [rank.told for rank in ranks])
    assert control.status()["state"] == control.state == "starting"
    ranks[1].say("recording", number=ranks[0].number)
    starting.join(LONG)
    assert control.state == "recording"
    control.finish()
    assert control.state == "ready"


def test_one_recording_at_a_time(control: Control, tmp_path: Path) -> None:
    Rank()
    control.start(order(tmp_path))
    with pytest.raises(UsageError, match="is being recorded"):
        control.start(order(tmp_path, out=str(tmp_path / "other.trace")))


def test_a_place_that_is_taken_is_refused(control: Control, tmp_path: Path) -> None:
    Rank()
    (tmp_path / "s.trace").mkdir()
    (tmp_path / "s.trace" / "mine.txt").write_text("keep")
    with pytest.raises(OutputExistsError):
        control.start(order(tmp_path))
    assert control.status()["state"] == "ready"


def test_a_recorder_that_cannot_begin(control: Control, tmp_path: Path) -> None:
    rank = Rank(begins=False)
    with pytest.raises(RecordingError, match="no room"):
        control.start(order(tmp_path))
    assert control.status()["state"] == "ready", "the next one may be tried"
    rank.begins = True
    control.start(order(tmp_path, out=str(tmp_path / "other.trace")))
    assert control.finish() == str(tmp_path / "other.trace")


def test_a_scheduler_that_dies_ends_the_recording(control: Control, tmp_path: Path) -> None:
    rank = Rank()
    control.start(order(tmp_path))
    rank.die()
    assert control.wait_until_ended(LONG)
    assert control.status()["last"] == {
        "out": str(tmp_path / "s.trace"),
        "outcome": "failed",
        "why": "the scheduler process ended",
        "detail": "",
        "waited_seconds": 0.0,
    }
    with pytest.raises(HostError):
        control.start(order(tmp_path, out=str(tmp_path / "other.trace")))


def test_nobody_reports(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARM_SECONDS", 0.1)
    with pytest.raises(HostError, match="recorder did not report"):
        control.start(order(tmp_path))


def test_a_client_that_went_away_does_not_keep_others_from_recording(
    control: Control, clock: Clock, tmp_path: Path
) -> None:
    rank = Rank()
    control.start(order(tmp_path, lease=10))
    for _ in range(3):
        clock.pass_by(9)
        control.renew()
    clock.pass_by(9)
    assert control.status()["state"] == "recording"
    clock.now += 2
    assert control.wait_until_ended(LONG)
    assert rank.orders[-1] == ("finish", {}, "its client went away")


def test_time_is_up(control: Control, clock: Clock, tmp_path: Path) -> None:
    rank = Rank()
    control.start(order(tmp_path, seconds=30))
    clock.pass_by(29)
    assert control.status()["state"] == "recording"
    clock.now += 1
    assert control.wait_until_ended(LONG)
    assert rank.orders[-1] == ("finish", {}, "time limit (30 s)")


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def assert_next_works(control: Control, tmp_path: Path, rank: Rank) -> None:
    assert control.status()["state"] == "ready"
    rank.deaf = ""
    control.start(order(tmp_path, out=str(tmp_path / "next.trace")))
    assert control.finish() == str(tmp_path / "next.trace")
    assert control.status()["last"]["outcome"] == "sealed"


@pytest.mark.parametrize("settings", [nested(5000), {"a": threading.Lock()}])
def test_settings_that_cannot_be_handed_over_are_refused_and_nothing_is_wedged(
    control: Control, tmp_path: Path, settings: dict[str, Any]
) -> None:
    rank = Rank()
    with pytest.raises(UsageError, match="nested too deeply"):
        control.start(order(tmp_path, settings=settings))
    control.start(order(tmp_path))
    with pytest.raises(UsageError, match="nested too deeply"):
        control.finish(settings)
    assert control.status()["state"] == "recording", "it goes on"
    control.finish()
    assert_next_works(control, tmp_path, rank)


@pytest.mark.parametrize("deaf", ["begin", "finish"])
def test_a_recorder_that_does_not_answer_is_given_up(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    rank = Rank(deaf=deaf)

    def run() -> None:
        control.start(order(tmp_path))
        control.finish(seconds=0.3)

    with monkeypatch.context() as patched:
        if deaf == "begin":
            patched.setattr(module, "BEGIN_SECONDS", 0.3)
        with pytest.raises(RecordingError, match=r"did not begin within|was not sealed within"):
            run()
    assert control.status()["last"]["outcome"] == "failed"
    rank.say("sealed", {"calls": 1}, number=1)  # late, and of no use to anybody
    assert_next_works(control, tmp_path, rank)
    assert rank.told[:2] == ["begin", "finish"], "a recorder that begins late ends at once"


def test_a_folder_that_hangs_is_given_up(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    hang = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(module, "FOLDER_SECONDS", 0.2)
        patched.setattr(module, "prepare_output", lambda _: hang.wait())
        with pytest.raises(RecordingError, match="did not answer within"):
            control.start(order(tmp_path))
    hang.set()
    assert_next_works(control, tmp_path, rank)


def test_a_server_that_is_shut_down_does_not_wait_for_somebodys_finish(control: Control, tmp_path: Path) -> None:
    rank = Rank(deaf="finish")
    control.start(order(tmp_path))
    said: list[str] = []

    def finish() -> None:
        try:
            control.finish()
        except RecordingError as error:
            said.append(str(error))

    waiting = threading.Thread(target=finish)
    waiting.start()
    wait_for(lambda: "finish" in rank.told, lambda: rank.told)
    control.close(0.5)
    waiting.join(LONG)  # by itself it waits much longer
    assert "was not sealed within 0.5 s" in said[0], "whoever waits is told"
    with pytest.raises(HostError, match="shut down"):
        control.start(order(tmp_path, out=str(tmp_path / "other.trace")))


def test_the_status_is_told_while_a_recorder_is_silent(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    control.start(order(tmp_path))
    assert control.status()["calls"] == 3
    rank.deaf = "counts"
    monkeypatch.setattr(module, "COUNT_SECONDS", 0.1)
    assert [control.status()["calls"] for _ in range(3)] == [3, 3, 3], "what was counted last"


def test_whoever_connects_and_says_nothing_or_nonsense_makes_nobody_deaf(control: Control, tmp_path: Path) -> None:
    address = control.environment[SESSION].split(":", 1)[1]
    silent, wrong, gone = (socket.socket(socket.AF_UNIX) for _ in range(3))
    for one in (silent, wrong, gone):
        one.connect(address)
    wrong.sendall(b"\xff" * 100)
    gone.close()
    Rank()
    assert module.ARM_SECONDS < GREETING_SECONDS, "a recorder is given up before whoever says nothing is"
    control.start(order(tmp_path))
    control.finish()
    silent.close()
    wrong.close()


def test_a_removal_that_hangs_does_not_make_a_shutdown_longer(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(module, "_remove", lambda _place: hang.wait())
    monkeypatch.setattr(module, "REMOVE_SECONDS", 0.2)
    rank = Rank(rows=0)
    control.start(order(tmp_path, keep_empty=False))
    control.finish()
    monkeypatch.setattr(module, "REMOVE_SECONDS", 1000.0)
    control.start(order(tmp_path, out=str(tmp_path / "next.trace")))
    rank.deaf = "finish"
    control.close(0.5)
    hang.set()


def test_an_order_that_is_too_large_for_a_pipe_nobody_reads_keeps_nobody(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEGIN_SECONDS", 0.3)
    connection = connect("recorder", SESSION)
    assert connection is not None
    connection.send(("armed", FACTS))
    settings = {str(number): "x" * 1000 for number in range(2000)}
    for number in range(3):
        with pytest.raises(RecordingError, match="did not begin"):
            control.start(order(tmp_path, out=str(tmp_path / f"{number}.trace"), settings=settings))
        assert control.status()["state"] == "ready"
    connection.close()


def test_a_rank_whose_disk_was_too_slow_ends_the_recording_of_all(control: Control, tmp_path: Path) -> None:
    other, slow = Rank(0, 2), Rank(1, 2, stops="the disk was too slow")
    control.start(order(tmp_path))
    assert control.wait_until_ended(LONG)
    assert other.orders[-1] == ("finish", {}, "the disk was too slow")
    assert control.status()["last"]["stopped"] == "the disk was too slow"
    assert "finish" not in slow.told or slow.told == ["begin", "finish"]


def test_what_a_client_asked_for_does_not_replace_what_the_server_is(control: Control, tmp_path: Path) -> None:
    rank = Rank()
    control.start(order(tmp_path, settings={"steps": 99, "topk": "lie", "prefix_cache": "lie", "temperature": 0.5}))
    manifest = rank.orders[0][2]
    assert (manifest.settings["steps"], manifest.settings["topk"], manifest.settings["prefix_cache"]) == (3, 1, True)
    assert manifest.settings["temperature"] == 0.5


@pytest.mark.parametrize(("rows", "keep", "there"), [(0, False, False), (0, True, True), (5, False, True)])
def test_a_trace_without_rows_is_removed_when_it_ends_and_the_status_says_so(
    control: Control, tmp_path: Path, rows: int, keep: bool, there: bool
) -> None:
    Rank(rows=rows)
    control.start(order(tmp_path, keep_empty=keep))
    place = tmp_path / "s.trace"
    (place / "manifest.json").write_text("{}")
    control.finish()
    assert place.exists() == there
    last = control.status()["last"]
    assert ("removed" in last) == (not there)
    assert control.outcomes == {str(place): last}


def test_only_the_recording_that_is_meant_is_ended(control: Control, tmp_path: Path) -> None:
    Rank()
    control.start(order(tmp_path))
    assert control.finish(only=str(tmp_path / "another.trace")) is None
    assert control.state == "recording"
    assert control.finish(only=str(tmp_path / "s.trace"))
    assert control.state == "ready"


def test_two_ranks_write_files_of_their_own(control: Control, tmp_path: Path) -> None:
    Rank(1, 2, rows=3), Rank(0, 2, rows=3)
    control.start(order(tmp_path))
    control.finish()
    assert {name: control.last[name] for name in ("rows", "bytes", "files")} == {"rows": 3, "bytes": 20, "files": 4}
