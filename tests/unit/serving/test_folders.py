"""Folders of sessions: those whose owner was killed are swept, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from eagle_trace_serving.folders import LOCK, OwnFolder, sweep
from eagle_trace_serving.session import Session

OWNER = """
import sys, time
from eagle_trace_serving.session import Session
session = Session("X")
print(session.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for such folders is the test's own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_folder_of_a_killed_process_goes_when_the_next_one_starts(temporary: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    assert sweep() == [], "its owner lives"
    assert (left / "socket").exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert (left / "socket").exists()
    session = Session("Y")
    assert list(temporary.iterdir()) == [session.folder]
    session.close()
    assert list(temporary.iterdir()) == []


def test_nothing_is_removed_without_a_proof(temporary: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / LOCK).write_text("")
    (temporary / "eagle-trace-link").symlink_to(precious)
    for name in ("eagle-trace-other", "eagle-trace-pipe", "eagle-trace-linked", "mine"):
        (temporary / name).mkdir()
    os.mkfifo(temporary / "eagle-trace-pipe" / LOCK)
    (temporary / "eagle-trace-linked" / LOCK).symlink_to(precious / LOCK)
    (temporary / "eagle-trace-file").write_text("")
    (temporary / "mine" / LOCK).write_text("")
    alive = OwnFolder()
    before = sorted(temporary.rglob("*"))
    assert sweep() == []
    assert sorted(temporary.rglob("*")) == before
    alive.cleanup()


def test_what_is_swept_takes_nothing_along_that_it_links_to(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    dead = temporary / "eagle-trace-dead"
    dead.mkdir()
    (dead / LOCK).write_text("")
    (dead / "link").symlink_to(tmp_path / "precious")
    assert sweep() == [dead]
    assert (tmp_path / "precious" / "file").exists()
