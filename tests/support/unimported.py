"""Which modules of SGLang's models and processors cannot be imported: ``python -m tests.support.unimported``.

Run in the environment of SGLang on a CPU. SGLang passes over such a module with a line in its log, and serves no model
of it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil

PACKAGES = ("sglang.srt.models", "sglang.srt.multimodal.processors")


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


if __name__ == "__main__":
    print(json.dumps(unimported()))
