"""A disk that hangs or is slow below a real server: its users get the same answers as fast as ever."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle_trace import open_trace
from eagle_trace.errors import TraceUnsealedError
from tests.support.attached import Attached, server
from tests.support.disk_faults import FILE, HANG, QUEUE
from tests.support.pairs import TARGET

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"The {name} statement " for name in ("return", "import", "for", "while", "def", "class", "with", "try")]
#: what an answer may take longer on a machine that does other things too; the 0.2 s that are promised are held by
#: tests/unit/test_patience.py, and a server that waits for a disk that hangs never answers
SLACK = 5.0


class Disk:
    """The disk below a server."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set("")

    def set(self, fault: str) -> None:
        other = self.file.with_name("next")
        other.write_text(fault)
        other.replace(self.file)  # the server never sees half of it


@pytest.fixture(scope="module")
def disk(folder: Path) -> Disk:
    (folder / "slow").mkdir()
    return Disk(folder / "slow" / "disk")


@pytest.fixture(scope="module")
def running(folder: Path, deployed: Path, disk: Disk) -> Iterator[Attached]:
    paths = [str(ROOT / "tests/support/engine_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {FILE: str(disk.file), QUEUE: str(512 << 10)}
    variables |= {"EAGLE_TRACE_REQUESTS": "0", "EAGLE_TRACE_RECORD_OTHERS": "1"}
    arguments = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--disable-radix-cache"]
    with pytest.MonkeyPatch.context() as patched:
        # not among the variables: the kernels for the CPU add a path of their own to what is there
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with server(folder / "slow", TARGET, deployed, *arguments, **variables) as attached:
            yield attached
            disk.set("")


@pytest.fixture(autouse=True)
def idle(running: Attached, disk: Disk) -> None:
    """Nothing is left of the test before."""
    disk.set("")
    if running.status["state"] == "recording":
        running.post("/eagle_trace/finish", {})


def ask_all(running: Attached, name: str, tokens: int = 60) -> tuple[list[str], float]:
    """Answers to all texts, one after another, and how long the longest took."""
    texts, longest = [], 0.0
    for number, text in enumerate(TEXTS):
        started = time.monotonic()
        texts.append(running.generate(text, f"{name}-{number}", tokens, ignore_eos=True)["text"])
        longest = max(longest, time.monotonic() - started)
    return texts, longest


def healthy(running: Attached) -> bool:
    with urllib.request.urlopen(running.url + "/health", timeout=30) as answer:
        return bool(answer.status == 200)


def refused(work: Callable[[], Any]) -> str:
    """Why a route did not do what it was asked."""
    with pytest.raises(urllib.error.HTTPError) as error:
        work()
    assert error.value.code == 409
    return str(json.loads(error.value.read())["error"])


def assert_records(running: Attached, disk: Disk) -> None:
    """The next recording works."""
    disk.set("")
    running.post("/eagle_trace/start", {"requests": 2})
    ask_all(running, "next", 8)
    running.wait_until("ready")
    assert running.status["last"]["outcome"] == "sealed", running.status
    assert len(open_trace(running.traces[-1]).prompts) == 2


@pytest.fixture(scope="module")
def usual(running: Attached) -> tuple[list[str], float]:
    """Answers, and the longest time to one, with nothing recorded."""
    ask_all(running, "warm")
    return ask_all(running, "usual")


@pytest.mark.parametrize("fault", [HANG, "0.2"])
def test_no_answer_waits_for_the_disk(
    running: Attached, disk: Disk, usual: tuple[list[str], float], fault: str
) -> None:
    running.post("/eagle_trace/start", {"requests": len(TEXTS)})
    disk.set(fault)
    started = time.monotonic()
    texts, longest = ask_all(running, "recorded")
    assert texts == usual[0]
    assert longest < usual[1] + SLACK
    assert healthy(running)
    running.wait_until("ready", 90)
    assert time.monotonic() - started < 120
    last = running.status["last"]
    place = Path(last["out"])
    if fault == HANG:
        assert last["outcome"] == "failed"
        assert "too slow or hangs" in last["why"]
        with pytest.raises(TraceUnsealedError):
            open_trace(place)
    else:
        # a part is one write, so such a disk may well keep up
        assert last["outcome"] == "sealed"
        trace = open_trace(place)
        assert trace.manifest.stopped in (None, "the disk was too slow")
        assert set(trace.keys("fc.out").call_id.tolist()) <= set(trace.calls.call_id)
    assert_records(running, disk)


def test_a_folder_that_hangs_is_refused_and_the_next_one_is_not(
    running: Attached, disk: Disk, usual: tuple[list[str], float]
) -> None:
    disk.set(HANG)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        start = pool.submit(lambda: refused(lambda: running.post("/eagle_trace/start", {"requests": 3})))
        texts, longest = ask_all(running, "meanwhile")
        assert "does its disk hang?" in start.result(60)
        assert time.monotonic() - began < 30
    assert texts == usual[0]
    assert longest < usual[1] + SLACK
    assert healthy(running)
    assert_records(running, disk)


@pytest.mark.parametrize("depth", [900, 3000])
def test_settings_that_are_nested_too_deeply_wedge_nothing(running: Attached, disk: Disk, depth: int) -> None:
    body = b'{"settings": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    request = urllib.request.Request(running.url + "/eagle_trace/start", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert 400 <= error.value.code < 500
    assert running.status["state"] == "ready"
    assert_records(running, disk)


def test_sigterm_with_a_disk_that_hangs_and_a_finish_that_waits(running: Attached, disk: Disk) -> None:
    running.post("/eagle_trace/start", {"requests": 99})
    disk.set(HANG)
    ask_all(running, "last", 8)

    def finish() -> None:
        try:
            running.post("/eagle_trace/finish", {})
        except OSError:
            ended.append(time.monotonic())

    ended: list[float] = []
    threading.Thread(target=finish, daemon=True).start()
    time.sleep(0.5)
    tree = psutil.Process(running.process.pid).children(recursive=True)
    started = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(60)
    # SGLang looks for the signal every 5 s
    assert time.monotonic() - started < 5 + 5 + 4
    psutil.wait_procs(tree, timeout=5)
    assert not [process for process in tree if process.is_running()]
