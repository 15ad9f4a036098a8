"""The beginning of a process that `record` starts: it is told what to serve, and ends with whoever started it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def take_job(end: Callable[[], None]) -> dict[str, Any]:
    """The job (`host.Launch`) whose file the command line names; `end` is called when standard input ends."""

    def wait() -> None:
        while os.read(0, 1 << 10):
            pass
        end()

    threading.Thread(target=wait, name="eagle-trace-parent", daemon=True).start()
    told: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return told
