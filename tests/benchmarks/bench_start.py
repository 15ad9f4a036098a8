"""How much later a server answers its first request when it is armed, and not recording.

    python tests/benchmarks/bench_start.py [ROUNDS]

SGLang is started as its users start it, unarmed and armed in turn, and asked one prompt. Seconds are from the start of
the process to its answer; CPU seconds are those of all its processes up to then, and tell more where others are at
work on the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis")]

from eagle_trace_analysis.checkpoint.export import export  # noqa: E402
from tests.support.attached import server  # noqa: E402
from tests.support.pairs import DRAFT, TARGET  # noqa: E402

ARGUMENTS = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
STATES = ("unarmed", "armed")


def first_answer(folder: Path, draft: Path, state: str) -> tuple[float, float]:
    """Seconds and CPU seconds to the first answer of a server in a state."""
    variables = {"EAGLE_TRACE_REQUESTS": "0"} | ({"EAGLE_TRACE_OUT": ""} if state == "unarmed" else {})
    started = time.monotonic()
    with server(folder, TARGET, draft, *ARGUMENTS, **variables) as running:
        running.generate("def ", tokens=8)
        seconds = time.monotonic() - started
        spent = sum(sum(process.cpu_times()[:2]) for process in running.processes)
        if state == "armed":
            running.wait_until("ready")
    return seconds, spent


def main() -> None:
    """Print a row per start, and the medians."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/engine_site"), str(ROOT)])
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[tuple[float, float]]] = {state: [] for state in STATES}
    with tempfile.TemporaryDirectory(prefix="eagle-trace-start-") as name:
        folder = Path(name)
        export(DRAFT, folder / "draft", target=TARGET)
        for number in range(rounds):
            for state in STATES:
                place = folder / f"{state}{number}"
                place.mkdir()
                found[state].append(first_answer(place, folder / "draft", state))
                print(f"{state:8} {found[state][-1][0]:7.2f} s {found[state][-1][1]:7.2f} CPU s", flush=True)
    for n, unit in enumerate(("s", "CPU s")):
        unarmed, armed = (statistics.median(one[n] for one in found[state]) for state in STATES)
        print(f"median: unarmed {unarmed:.2f} {unit}, armed {armed:.2f} {unit}, {armed - unarmed:+.2f}")


if __name__ == "__main__":
    main()
