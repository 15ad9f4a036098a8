"""The folder of a session, and the removal of those whose owner was killed.

Its owner holds a lock on a file in it, which the operating system lets go of when the process ends, however it ends. So
a lock that can be had proves that the owner is dead; anything less does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "eagle-trace-"
LOCK = "owner.lock"


class OwnFolder:
    """A folder that only this user can enter, and that goes with its owner."""

    def __init__(self) -> None:
        sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        # locked before it has its name: whoever sees the name sees the lock
        unnamed = self.path / f"{LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def cleanup(self) -> None:
        """Remove it."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> list[Path]:
    """Remove the folders of this user's sessions whose owner is dead, and return them."""
    gone = []
    with contextlib.suppress(OSError):  # somebody else sweeps too, or the folder for such files cannot be read
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_dead(path):
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path)
    return gone


def _is_dead(path: Path) -> bool:
    """Whether `path` is the folder of a session of this user whose owner is dead; follows no link, waits for nobody."""
    try:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            return False
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(lock)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)
