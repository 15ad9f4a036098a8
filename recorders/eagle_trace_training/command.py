"""`eagle-trace record --mode train ... -- COMMAND`: run somebody's training as they run it, with the recorder armed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace.reader import open_trace
from eagle_trace.recording.wanted import Wanted
from eagle_trace.store import Place, open_store, reason
from eagle_trace.writer import prepare_output, remove_empty
from eagle_trace_training import arm

SHIM = Path(__file__).parent / "shim"


@dataclass(frozen=True)
class Recorded:
    """What came of a command.

    Attributes:
        status: exit status: the command's own, or 2 where it ended well and nothing was recorded.
        trace: folder of the trace, None if there is none.
        problem: one sentence if there is no whole trace, else empty.
    """

    status: int
    trace: Place | None
    problem: str = ""


def record_command(
    command: Sequence[str],
    *,
    out: Place,
    batches: int = 2,
    first_token: int | None = None,
    force: bool = False,
    **kept: Any,
) -> Recorded:
    """Run `command` with its standard streams and record the first forwards of the EAGLE-3 draft that it trains.

    Args:
        command: the command and its arguments, e.g. ``speculators train --config run.yaml``.
        out: folder of the trace, or its URL; all ranks of the command write into it.
        batches, first_token: see `recording`.
        force: replace the trace at `out`.
        kept: fields of `Wanted`.

    Raises:
        UsageError: there is no such command, or an option makes no sense.
        OutputExistsError: `out` is taken.
    """
    if batches < 1:
        raise UsageError(f"--batches must be 1 or more, not {batches}")
    wanted = Wanted(**kept)
    program = _program(command[0])
    if isinstance(out, Path):
        out = out.absolute()
    prepare_output(out, force=force)
    search = os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])])
    stays = f"{arm.PREFIX}MAX_WAIT"
    inherited = {name: value for name, value in os.environ.items() if name == stays or not name.startswith(arm.PREFIX)}
    told = arm.environment(wanted, out=out, batches=batches, first_token=first_token)
    environment = inherited | told | {"PYTHONPATH": search}
    started: list[subprocess.Popen[bytes]] = []
    with _signals_to(started):
        try:
            child = subprocess.Popen([program, *command[1:]], env=environment)
        except OSError as error:
            remove_empty(out)
            raise UsageError(f"cannot run {program}: {reason(error)}") from error
        started.append(child)
        status = child.wait()
    # a shell says it this way, too
    status = 128 - status if status < 0 else status
    return _outcome(command, status, out)


def _program(name: str) -> str:
    # a virtual environment's commands are found although it is not activated
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise UsageError(f"there is no command {name!r}: after -- comes the training command as you start it")
    return found


@contextlib.contextmanager
def _signals_to(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whoever waits for the command must not die first. Ctrl-C reaches it anyway, since it shares the terminal."""

    def forward(number: int, _frame: object) -> None:
        for child in children:
            child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread, which decides by itself
        return
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(command: Sequence[str], status: int, out: Place) -> Recorded:
    words = " ".join(command[:2])
    if not open_store(out).sizes():
        remove_empty(out)
        return Recorded(
            status or 2,
            None,
            f"{words} ended with status {status} and ran no forward of an EAGLE-3 draft that could be recorded: does "
            "it train one, with a Python that has eagle-trace, and without -I, -S or -E?",
        )
    problem = ""
    try:
        trace = open_trace(out)
        if not trace.table("calls").num_rows:
            problem = f"{out} holds no forward: {trace.manifest.stopped}"
    except EagleTraceError as error:
        problem = str(error)
    return Recorded(status or (2 if problem else 0), out, problem)
