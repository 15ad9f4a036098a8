"""How long a server takes to end after SIGTERM: without eagle-trace, armed, recording, and at worst.

    python tests/benchmarks/bench_stop.py

SGLang looks for the signal every five seconds, so the first figure is up to that much more than the second: seconds
from when it sees that no request is left until its last process is gone. Every state is a server of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis")]

from eagle_trace_analysis.checkpoint.export import export  # noqa: E402
from eagle_trace_serving import process  # noqa: E402
from tests.support.attached import Attached, seconds_to_end, server  # noqa: E402
from tests.support.disk_faults import FILE, HANG, QUEUE  # noqa: E402
from tests.support.pairs import DRAFT, TARGET  # noqa: E402
from tests.support.warm.start import warm_python  # noqa: E402

STATES = ("without eagle-trace", "armed, idle", "a recording goes on", "the disk hangs, a client waits for the seal")
ARGUMENTS = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


def prepare(running: Attached, state: str, disk: Path) -> None:
    """Bring a server that just started into a state."""
    running.generate("def ", tokens=8)
    if state in STATES[2:]:
        running.post("/eagle_trace/start", {"requests": 99})
        if state == STATES[3]:
            disk.write_text(HANG)
        for number in range(6):
            running.generate(f"{number} is a number ", tokens=24)
    if state == STATES[3]:
        threading.Thread(target=_finish, args=(running,), daemon=True).start()
        time.sleep(0.5)


def _finish(running: Attached) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        running.post("/eagle_trace/finish", {})


def main() -> None:
    """Print a row per state."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/engine_site"), str(ROOT)])
    print(f"{'state':44} {'from SIGTERM [s]':>17} {'from the last request [s]':>26} {'more than without [s]':>22}")
    with tempfile.TemporaryDirectory(prefix="eagle-trace-stop-") as name, warm_python() as python:
        folder = Path(name)
        export(DRAFT, folder / "draft", target=TARGET)
        without = 0.0
        for number, state in enumerate(STATES):
            place = folder / str(number)
            place.mkdir()
            disk = place / "disk"
            disk.write_text("")
            variables = {FILE: str(disk), QUEUE: str(512 << 10), "EAGLE_TRACE_REQUESTS": "0"}
            variables["EAGLE_TRACE_RECORD_OTHERS"] = "1"
            if state == STATES[0]:
                variables["EAGLE_TRACE_OUT"] = ""
            with (
                mock.patch.object(process, "PYTHON", python),
                server(place, TARGET, folder / "draft", *ARGUMENTS, **variables) as running,
            ):
                prepare(running, state, disk)
                started = time.monotonic()
                seconds = seconds_to_end(running)
                whole = time.monotonic() - started
            without = without or seconds
            print(f"{state:44} {whole:17.2f} {seconds:26.2f} {seconds - without:22.2f}", flush=True)


if __name__ == "__main__":
    main()
