"""The plugin in a server that is not recorded: it does nothing, and costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: what reading the variables takes
LIGHT = ["eagle_trace_serving", "eagle_trace_serving.environment", "eagle_trace_sglang", "eagle_trace_sglang.plugin"]

SCRIPT = """
import json, sys, time
before, start = set(sys.modules), time.perf_counter()
from eagle_trace_sglang.plugin import load
load()
print(json.dumps([time.perf_counter() - start, sorted(set(sys.modules) - before)]))
"""


def run(**variables: str) -> tuple[float, list[str]]:
    roots = os.pathsep.join(path for path in sys.path if path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_TRACE")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"PYTHONPATH": roots} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = json.loads(done.stdout)
    return seconds, [name for name in modules if name.split(".")[0] not in sys.stdlib_module_names]


def test_nothing_is_imported_and_nothing_done_when_it_is_not_armed() -> None:
    _, modules = run()
    assert modules == LIGHT


def test_a_process_of_the_server_that_schedules_nothing_is_left_alone(tmp_path: Path) -> None:
    # the tokenizer's and detokenizer's: armed, but without a scheduler
    _, modules = run(EAGLE_TRACE_SESSION=f"00:{tmp_path / 'socket'}")
    assert modules == LIGHT


def test_an_armed_main_process_loads_nothing_that_only_readers_of_traces_need() -> None:
    script = "import sys, eagle_trace_serving.attached, eagle_trace_serving.routes; print(*sys.modules)"
    roots = os.pathsep.join(path for path in sys.path if path)
    environment = dict(os.environ) | {"PYTHONPATH": roots}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "eagle_trace_serving.routes" in loaded
    assert not {"pandas", "torch", "transformers", "eagle_trace.reader"}.intersection(loaded)
