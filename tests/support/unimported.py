"""Which modules of SGLang's models and processors cannot be imported: ``python -m tests.support.unimported``.

Run in the environment of SGLang on a CPU. SGLang passes over such a module with a line in its log, and serves no model
of it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("sglang.srt.models", "sglang.srt.multimodal.processors")
ROOT = Path(__file__).parents[2]


def unimported() -> dict[str, str]:
    """The reason for each module that fails, by the module's name."""
    failed = {}
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            try:
                importlib.import_module(module.name)
            except Exception as error:  # noqa: BLE001 (whatever it is, SGLang passes over it)
                failed[module.name] = f"{type(error).__name__}: {error}"
    return failed


def unimported_in(python: Sequence[str]) -> dict[str, str]:
    """The same in a process of its own, started by ``python MODULE``."""
    from sglang_cpu_eagle import cpu_environment

    environment = cpu_environment(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    ended = subprocess.run(
        [*python, "tests.support.unimported"], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(unimported()), flush=True)
