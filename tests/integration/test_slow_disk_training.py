"""A disk that hangs or is slow below a training: the loop goes on as fast as ever, and computes the same."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_trace import open_trace, writer
from eagle_trace.errors import TraceUnsealedError
from tests.support import disk_faults
from tests.support.disk_faults import FILE, HANG

pytest.importorskip("speculators")

from eagle_trace_speculators import live, recording
from tests.support.tiny_speculators import Pair, random_prompts, write_pair
from tests.support.training import Loop, collate, sample, trainable

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


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
    """The file that says what the disk does; a few batches fill the queue in front of it."""
    file = tmp_path / "disk"
    file.write_text("")
    monkeypatch.setenv(FILE, str(file))
    for owner, name in disk_faults.PLACES:
        monkeypatch.setattr(owner, name, disk_faults.behind(getattr(owner, name)))
    monkeypatch.setattr(writer, "QUEUE_BYTES", 64 << 10)
    monkeypatch.setattr(writer, "GUEST_STALL_SECONDS", 3.0)
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.05)
    yield file
    file.write_text("")


def train(pair: Pair, batch: dict[str, Any]) -> Iterator[Loop]:
    loop = Loop(trainable(pair))
    for _ in range(STEPS):
        loop.step(batch)
        yield loop


@pytest.fixture(scope="module")
def usual(pair: Pair, batch: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
    """What the training leaves behind without a recording, and how long the longest step took."""
    (left, longest) = timed(train(pair, batch))
    return left, longest


def timed(loops: Iterator[Loop]) -> tuple[list[torch.Tensor], float]:
    longest, started = 0.0, time.monotonic()
    left: list[torch.Tensor] = []
    for loop in loops:
        longest = max(longest, time.monotonic() - started)
        left, started = loop.left.tensors(), time.monotonic()
    return left, longest


@pytest.mark.parametrize("fault", [HANG, "0.2"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_no_step_waits_for_the_disk(
    pair: Pair, batch: dict[str, Any], usual: tuple[list[torch.Tensor], float],
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, when: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING, "eagle_trace")
    out = tmp_path / "t.trace"

    def steps() -> Iterator[Loop]:
        if when == "before":
            disk.write_text(fault)
        started = time.monotonic()
        with recording(trainable_of(loops := train(pair, batch)), out=out, batches=STEPS):
            assert time.monotonic() - started < 2
            for number, loop in enumerate(loops):
                if number == 2:
                    disk.write_text(fault)
                yield loop
            started = time.monotonic()
        assert time.monotonic() - started < live.LEAVE_SECONDS + 1, "leaving the block"

    left, longest = timed(steps())
    assert longest < usual[1] + 1.0
    assert all(torch.equal(one, other) for one, other in zip(left, usual[0], strict=True))
    disk.write_text("" if fault != HANG else HANG)
    end = time.monotonic() + 30
    while live._sealing:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert any(words in caplog.text for words in ("too slow", "could not be finished", "ended")), caplog.text
    if fault == HANG and when == "between":
        with pytest.raises(TraceUnsealedError):
            open_trace(out)
    disk.write_text("")
    # the next one works
    with recording(trainable_of(again := train(pair, batch)), out=tmp_path / "next.trace", batches=2):
        for _ in again:
            pass
    assert open_trace(tmp_path / "next.trace").manifest.stopped is None


def trainable_of(loops: Iterator[Loop]) -> Any:
    """The model of a training that is about to run."""
    return next(loops).model


def test_a_training_whose_disk_hangs_ends(pair: Pair, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
import torch
from eagle_trace.store import Sink
from eagle_trace_speculators import recording
from tests.support.tiny_speculators import *
from tests.support.training import *
pair = write_pair(Path(sys.argv[1]) / "pair")
loop = Loop(trainable(pair))
batch = collate([sample(pair, ids, 4) for ids in random_prompts([9, 12])])
Sink.write = lambda self, data: time.sleep(10000)
recording(loop.model, out=sys.argv[1] + "/t.trace", batches=2).__enter__()
for _ in range(3):
    loop.step(batch)
print("trained", time.monotonic(), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    ended = time.monotonic()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained ")
    assert ended - float(done.stdout.split()[1]) < live.LEAVE_SECONDS + 5
