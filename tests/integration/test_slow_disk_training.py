"""A disk that hangs or is slow below a training: the loop waits no longer than promised, and computes the same.

Nothing here holds seconds against a clock but what hangs for good otherwise: a loop that waits for a disk that hangs
would never get on. How long the training waited is what the recorder counted.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_trace import open_trace, writer
from eagle_trace.errors import TraceNotFoundError, TraceUnsealedError
from eagle_trace.patience import MAX_WAIT
from tests.support import disk_faults
from tests.support.disk_faults import FILE, HANG, LATE, touched_by_hosts

pytest.importorskip("speculators")

from eagle_trace_speculators import recording
from eagle_trace_training import live
from tests.support.tiny_speculators import Pair, random_prompts, write_pair
from tests.support.training import Loop, collate, sample, trainable

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
#: what each call takes on a slow disk; some hundred make a trace
SLOW = "0.03"
#: when a disk that hangs lets go, so that a test fails that waits for it [s]
GIVE_UP = 240.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def batch(pair: Pair) -> dict[str, Any]:
    return collate([sample(pair, ids, 4) for ids in random_prompts([9, 12])])


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that says what the disk does; it is written to often, and one step fills the queue in front of it."""
    file = tmp_path / "disk"
    file.write_text("")
    monkeypatch.setenv(FILE, str(file))
    for owner, name in disk_faults.PLACES:
        monkeypatch.setattr(owner, name, disk_faults.behind(getattr(owner, name)))
    monkeypatch.setattr(writer, "QUEUE_BYTES", 64 << 10)
    monkeypatch.setattr(writer, "GUEST_STALL_SECONDS", 1.0)
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.0)
    timer = threading.Timer(GIVE_UP, file.write_text, ("",))
    timer.daemon = True
    timer.start()
    yield file
    timer.cancel()
    file.write_text("")


def train(pair: Pair, batch: dict[str, Any]) -> Iterator[Loop]:
    loop = Loop(trainable(pair))
    for _ in range(STEPS):
        loop.step(batch)
        yield loop


@pytest.fixture(scope="module")
def usual(pair: Pair, batch: dict[str, Any]) -> list[torch.Tensor]:
    """What the training leaves behind without a recording."""
    *_, loop = train(pair, batch)
    return loop.left.tensors()


def wait_for_seals() -> None:
    """What is sealed in the background is done."""
    end = time.monotonic() + GIVE_UP
    while live._sealing:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("fault", [HANG, SLOW])
@pytest.mark.parametrize("when", ["before", "between"])
def test_no_step_waits_for_the_disk(
    pair: Pair, batch: dict[str, Any], usual: list[torch.Tensor],
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, when: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING, "eagle_trace")
    out = tmp_path / "t.trace"
    loop = Loop(trainable(pair))
    if when == "before":
        disk.write_text(fault)
    with recording(loop.model, out=out, batches=STEPS) as running:
        for number in range(STEPS):
            if number == 2:
                disk.write_text(fault)
            loop.step(batch)
    assert disk.read_text() == fault, "somebody waited until the disk let go"
    assert running.waited <= MAX_WAIT + LATE
    assert touched_by_hosts(disk) == ""
    assert all(torch.equal(one, other) for one, other in zip(loop.left.tensors(), usual, strict=True))
    wait_for_seals()
    disk.write_text("")
    if fault == HANG:
        assert "could not be finished" in caplog.text
        assert running.waited > 0, "the queue was never full"
        with pytest.raises(TraceNotFoundError if when == "before" else TraceUnsealedError):
            open_trace(out)
    else:
        trace = open_trace(out)
        assert trace.manifest.stopped in (None, writer.TOO_SLOW)
        assert trace.manifest.waited_seconds <= running.waited
        assert set(trace.keys("fc.out").call_id.tolist()) <= set(trace.calls.call_id)
    assert_records(pair, batch, tmp_path / "next.trace")


def assert_records(pair: Pair, batch: dict[str, Any], out: Path) -> None:
    """The next recording works."""
    loop = Loop(trainable(pair))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "QUEUE_BYTES", 256 << 20)
        with recording(loop.model, out=out, batches=2):
            loop.step(batch)
            loop.step(batch)
    wait_for_seals()
    assert open_trace(out).manifest.stopped is None


def test_a_training_whose_disk_hangs_ends(pair: Pair, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from eagle_trace.store import Sink
from eagle_trace_speculators import recording
from tests.support.tiny_speculators import *
from tests.support.training import *
pair = Pair(Path(sys.argv[1]), Path(sys.argv[2]))
loop = Loop(trainable(pair))
batch = collate([sample(pair, ids, 4) for ids in random_prompts([9, 12])])
Sink.write = lambda self, data: time.sleep(10000)
recording(loop.model, out=sys.argv[3] + "/t.trace", batches=2).__enter__()
for _ in range(3):
    loop.step(batch)
print("trained", time.monotonic(), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair.target), str(pair.draft), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    ended = time.monotonic()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained ")
    # what waits at the end of the process, and the end of an interpreter that holds torch, on a busy machine
    assert ended - float(done.stdout.split()[1]) < live.LEAVE_SECONDS + 100
