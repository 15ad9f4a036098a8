"""A module of the tests in a process of its own, since SGLang keeps its state for the life of a process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_module(name: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
    """Run a module to its end, as SGLang runs on a CPU.

    Within ``with warm():`` SGLang is imported already (`tests.support.warm`).

    Args:
        name: of the module.
        arguments: of its command line.
        environment: of the process, if not this one's with what SGLang needs on a CPU.
    """
    from eagle_trace_serving import process
    from sglang_cpu_eagle import cpu_environment

    done = subprocess.run(
        [*process.PYTHON, name, *map(str, arguments)],
        env=cpu_environment(os.environ) if environment is None else environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
