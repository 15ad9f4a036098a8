"""Orders to the recorder in a scheduler process: none waits for another, the scheduler's thread for none of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from eagle_trace import open_trace
from eagle_trace.manifest import Manifest
from eagle_trace.store import Sink
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_serving import recorder as module
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recorder import ServeRecorder
from eagle_trace_serving.recording import Recording


class Main:
    """SGLang's main process, as a recorder sees it."""

    def __init__(self) -> None:
        self.connection, self.other = Pipe()

    def order(self, name: str, number: int, *arguments: Any) -> None:
        self.connection.send((name, number, *arguments))

    def begin(self, number: int, out: Path) -> None:
        order = Order(str(out), Admission(requests=2), level="stats", max_wait=0.2)
        self.order("begin", number, order, Manifest("serve", "stats", "sglang"))

    def hears(self, seconds: float = 120) -> tuple[Any, ...]:
        assert self.connection.poll(seconds), "nothing was said"
        return tuple(self.connection.recv())


class Draft:
    """A draft without a site."""

    rank, ranks = 0, 1

    def facts(self) -> Facts:
        raise NotImplementedError

    def params(self) -> list[dict[str, Any]]:
        return []

    def recording(self, order: Order, writer: TraceWriter) -> Recording:
        return Recording(order, writer, 4)

    def hang(self, *_: object) -> None:
        pass


@pytest.fixture
def main() -> Main:
    return Main()


@pytest.fixture
def recorder(main: Main) -> Iterator[ServeRecorder]:
    """A recorder whose draft has nothing to hang hooks into."""
    made = ServeRecorder(Draft(), main.other)
    threading.Thread(target=made._obey, daemon=True).start()
    yield made
    main.connection.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Folders are opened, and files written, while this is set."""
    opened = threading.Event()
    opened.set()
    for owner, name in ((TraceWriter, "_open"), (Sink, "write")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real: (opened.wait(), real(*given))[1])
    yield opened
    opened.set()


def test_a_recording_begins_is_counted_and_ends(main: Main, recorder: ServeRecorder, tmp_path: Path) -> None:
    main.begin(1, tmp_path / "t")
    assert main.hears() == ("recording", 1)
    main.order("counts", 1)
    assert main.hears()[:2] == ("counts", 1)
    main.order("finish", 1, {"a": 1}, "told to stop")
    name, number, outcome = main.hears()
    assert (name, number, outcome["stopped"]) == ("sealed", 1, "told to stop")
    assert open_trace(tmp_path / "t").manifest.settings["a"] == 1
    assert recorder._active is None


def test_an_end_overtakes_a_beginning_that_hangs(
    main: Main, recorder: ServeRecorder, gate: threading.Event, tmp_path: Path
) -> None:
    gate.clear()
    main.begin(1, tmp_path / "t")
    main.order("finish", 1, {}, "it was given up")
    main.order("counts", 1)
    assert main.hears()[0] == "counts", "it listens all the same"
    gate.set()
    name, number, outcome = main.hears()
    assert (name, number, outcome["stopped"]) == ("sealed", 1, "it was given up")
    assert recorder._active is None
    main.begin(2, tmp_path / "next")
    assert main.hears() == ("recording", 2)


def test_what_fails_in_the_schedulers_thread_ends_the_recording_at_once(
    main: Main, recorder: ServeRecorder, gate: threading.Event, tmp_path: Path
) -> None:
    main.begin(1, tmp_path / "t")
    assert main.hears() == ("recording", 1)
    gate.clear()

    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    recorder.tell(broken)
    recorder.tell(broken)
    recorder.between_batches()  # nor does anything above return before the disk moves, if it waits for it
    name, number, why, detail, waited = main.hears()
    assert (name, number, why) == ("failed", 1, "a bug")
    assert "ZeroDivisionError" in detail
    assert waited == 0.0
    main.order("finish", 1, {}, None)
    gate.set()
    main.begin(2, tmp_path / "next")
    assert main.hears() == ("recording", 2)


def test_a_process_that_ends_seals_in_a_few_seconds_or_not_at_all(
    main: Main, recorder: ServeRecorder, gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.5)
    main.begin(1, tmp_path / "t")
    assert main.hears() == ("recording", 1)
    gate.clear()
    arrived = SimpleNamespace(rid="a", prompt_ids=[1], answer_ids=[], finish_reason=None, has_media=False)
    arrived.text = lambda *_: ""
    recorder.arrived(arrived)
    recorder._leave()
    gate.set()
    assert main.hears()[0] == "sealed", "the disk came back while the process still lived"


def test_a_begin_that_is_refused_leaves_nothing_behind(
    main: Main, recorder: ServeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_output(tmp_path / "t")
    TraceWriter(tmp_path / "t", Manifest("serve", "stats", "sglang")).seal()
    main.begin(1, tmp_path / "t")
    name, number, why, *_ = main.hears()
    assert (name, number) == ("failed", 1)
    assert "two recorders" in why
    monkeypatch.setattr(Draft, "hang", lambda *_: 1 / 0)
    main.begin(2, tmp_path / "u")
    assert main.hears()[:2] == ("failed", 2)
    assert open_trace(tmp_path / "u", allow_partial=True).manifest.recorder == ""
    monkeypatch.setattr(Draft, "hang", lambda *_: None)
    main.begin(3, tmp_path / "v")
    assert main.hears() == ("recording", 3)
