"""A disk that hangs or is slow below a real server: its users get the same answers, and wait no longer than promised.

How long the server waited is what its recorder counted, and no thread that serves ever touches the disk: so nothing
here depends on how fast the machine is. A server that waits for a disk that hangs never answers at all.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import open_trace
from eagle_trace.errors import TraceUnsealedError
from eagle_trace.patience import MAX_WAIT
from tests.support.attached import Attached, seconds_to_end, server
from tests.support.disk_faults import FILE, HANG, LATE, QUEUE, touched_by_hosts
from tests.support.pairs import TARGET
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"The {name} statement " for name in ("return", "import", "for", "while", "def", "class", "with", "try")]
ARGUMENTS = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--disable-radix-cache"]
#: what the end of a server may take longer with a recorder in it [s]: 5 s are promised, the rest is for a machine that
#: does much else; less than a disk that hangs is waited for where nobody is in a hurry
LONGER = 9.0


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
def running(folder: Path, deployed: Path, disk: Disk, warm: Warm) -> Iterator[Attached]:
    paths = [str(ROOT / "tests/support/engine_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {FILE: str(disk.file), QUEUE: str(512 << 10)}
    variables |= {"EAGLE_TRACE_REQUESTS": "0", "EAGLE_TRACE_RECORD_OTHERS": "1"}
    with pytest.MonkeyPatch.context() as patched:
        # not among the variables: the kernels for the CPU add a path of their own to what is there
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with warm(), server(folder / "slow", TARGET, deployed, *ARGUMENTS, **variables) as attached:
            yield attached
            disk.set("")


@pytest.fixture(autouse=True)
def idle(running: Attached, disk: Disk) -> None:
    """Nothing is left of the test before."""
    disk.set("")
    if running.status["state"] == "recording":
        running.post("/eagle_trace/finish", {})


def ask_all(running: Attached, name: str, tokens: int = 60) -> list[str]:
    """Answers to all texts, one after another."""
    return [
        running.generate(text, f"{name}-{number}", tokens, ignore_eos=True)["text"] for number, text in enumerate(TEXTS)
    ]


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
    out = running.post("/eagle_trace/start", {"requests": 2})["out"]
    ask_all(running, "next", 8)
    running.wait_until("ready")
    assert running.status["last"]["outcome"] == "sealed", running.status
    assert len(open_trace(out).prompts) == 2


@pytest.fixture(scope="module")
def usual(running: Attached) -> list[str]:
    """Answers with nothing recorded."""
    return ask_all(running, "usual")


@pytest.mark.parametrize("fault", [HANG, "0.05"])
def test_no_answer_waits_for_the_disk(running: Attached, disk: Disk, usual: list[str], fault: str) -> None:
    running.post("/eagle_trace/start", {"requests": len(TEXTS)})
    disk.set(fault)
    assert ask_all(running, "recorded") == usual
    assert healthy(running)
    running.wait_until("ready")
    last = running.status["last"]
    assert last["waited_seconds"] <= MAX_WAIT + LATE
    assert touched_by_hosts(disk.file) == ""
    place = Path(last["out"])
    if fault == HANG:
        assert last["outcome"] == "failed"
        assert "too slow or hangs" in last["why"]
        assert last["waited_seconds"] > 0, "the queue was never full"
        with pytest.raises(TraceUnsealedError):
            open_trace(place)
    else:
        # a part is one write, so such a disk may well keep up
        assert last["outcome"] == "sealed"
        trace = open_trace(place)
        assert trace.manifest.stopped in (None, "the disk was too slow")
        assert trace.manifest.waited_seconds == last["waited_seconds"]
        assert set(trace.keys("fc.out").call_id.tolist()) <= set(trace.calls.call_id)
    assert_records(running, disk)


def test_a_folder_that_hangs_is_refused_and_the_next_one_is_not(
    running: Attached, disk: Disk, usual: list[str]
) -> None:
    disk.set(HANG)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(lambda: refused(lambda: running.post("/eagle_trace/start", {"requests": 3})))
        assert ask_all(running, "meanwhile") == usual
        assert "does its disk hang?" in start.result(300)
    assert healthy(running)
    assert touched_by_hosts(disk.file) == ""
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


def test_a_server_ends_as_it_would_without_a_recorder_but_for_a_few_seconds(
    running: Attached, disk: Disk, folder: Path, deployed: Path, warm: Warm
) -> None:
    (folder / "without").mkdir()
    with warm(), server(folder / "without", TARGET, deployed, *ARGUMENTS, EAGLE_TRACE_OUT="") as plain:
        plain.generate(TEXTS[0], "a", 8)
        without = seconds_to_end(plain)
    # the worst: a disk that hangs, a recording that goes on, and a client that waits for its end
    running.post("/eagle_trace/start", {"requests": 99})
    disk.set(HANG)
    ask_all(running, "last", 8)
    finish = threading.Thread(target=finish_or_lose, args=(running,), daemon=True)
    finish.start()
    time.sleep(0.5)
    assert seconds_to_end(running) <= without + LONGER
    assert not running.processes
    finish.join(10)
    assert not finish.is_alive(), "who waits for a route is let go"


def finish_or_lose(running: Attached) -> None:
    """End the recording, or lose the connection."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        running.post("/eagle_trace/finish", {})
