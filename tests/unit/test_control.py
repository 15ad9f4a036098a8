"""Starting and ending recordings from SGLang's main process; the recorders are stand-ins that talk as they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import HostError, OutputExistsError, RecordingError, UsageError
from eagle_trace_sglang import control as module
from eagle_trace_sglang.control import Control
from eagle_trace_sglang.orders import Order
from eagle_trace_sglang.plugin import SESSION
from eagle_trace_sglang.session import connect

FACTS = {
    "packages": {}, "target": "org/target", "draft": "org/draft", "device": "cpu", "dtype": "float32",
    "architecture": "x", "algorithm": "EAGLE3", "steps": 3, "topk": 1, "draft_tokens": 4, "prefix_cache": True,
    "ranks": 1, "replicas": 1, "partial_sums": [], "dropped_keys": [], "target_hidden_size": 4, "fused_mlp": False,
    "warnings": [], "missing": [],
}  # fmt: skip


class Rank:
    """A recorder that does as it is told, and remembers what that was."""

    def __init__(
        self, rank: int = 0, ranks: int = 1, *, begins: bool = True, dies: bool = False, rows: int = 1
    ) -> None:
        connection = connect("recorder", SESSION)
        assert connection is not None
        self.connection = connection
        self.begins, self.dies, self.rows = begins, dies, rows
        self.orders: list[tuple[Any, ...]] = []
        connection.send(("armed", FACTS | {"rank": rank, "ranks": ranks}))
        threading.Thread(target=self._obey, daemon=True).start()

    def counts(self) -> dict[str, int]:
        return {"requests": 1, "ended": 1, "calls": 7, "rows": self.rows, "bytes": 10, "files": 2}

    def _obey(self) -> None:
        while True:
            try:
                order = self.connection.recv()
            except (EOFError, OSError):
                return
            self.orders.append(order)
            if order[0] == "begin":
                self.connection.send(("recording",) if self.begins else ("failed", "no room", ""))
                if self.dies:
                    time.sleep(0.3)
                    self.connection.close()
                    return
            elif order[0] == "finish":
                self.connection.send(("sealed", self.counts()))
            else:
                self.connection.send(("counts", {"requests": 1, "ended": 0, "calls": 3}))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    made = Control()
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
    assert [[name for name, *_ in rank.orders if name != "counts"] for rank in ranks] == [["begin", "finish"]] * 2


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
    Rank(begins=False)
    with pytest.raises(RecordingError, match="no room"):
        control.start(order(tmp_path))
    assert control.status()["state"] == "ready", "the next one may be tried"


def test_a_scheduler_that_dies_ends_the_recording(control: Control, tmp_path: Path) -> None:
    Rank(dies=True)
    control.start(order(tmp_path))
    assert control.wait_until_ended(5)
    assert control.status()["last"] == {
        "out": str(tmp_path / "s.trace"),
        "outcome": "failed",
        "why": "the scheduler process ended",
        "detail": "",
    }
    with pytest.raises(HostError):
        control.start(order(tmp_path, out=str(tmp_path / "other.trace")))


def test_nobody_reports(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARM_SECONDS", 0.1)
    with pytest.raises(HostError, match="recorder did not report"):
        control.start(order(tmp_path))


def test_a_client_that_went_away_does_not_keep_others_from_recording(control: Control, tmp_path: Path) -> None:
    rank = Rank()
    control.start(order(tmp_path, lease=0.6))
    for _ in range(3):
        time.sleep(0.3)
        control.renew()
    assert control.status()["state"] == "recording"
    assert control.wait_until_ended(5)
    assert rank.orders[-1] == ("finish", {}, "its client went away")


def test_time_is_up(control: Control, tmp_path: Path) -> None:
    rank = Rank()
    control.start(order(tmp_path, seconds=0.3))
    assert control.wait_until_ended(5)
    assert rank.orders[-1] == ("finish", {}, "time limit (0.3 s)")


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
