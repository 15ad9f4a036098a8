"""The server as a context: `python` is the command that stands for ``python -m``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support.warm.client import ADDRESS

ROOT = Path(__file__).parents[3]

#: a context in which SGLang starts in seconds
Warm = Callable[[], AbstractContextManager[None]]


@contextmanager
def warm_python(host: str = "sglang", ahead: Path | None = None, **variables: str) -> Iterator[list[str]]:
    """Start the server; the command that runs a module by it, for this process and those it starts.

    Args:
        host: what to import beforehand.
        ahead: folder that comes first in PYTHONPATH.
        variables: what else its environment says.
    """
    with tempfile.TemporaryDirectory(prefix="eagle-trace-warm-") as folder:
        address = str(Path(folder) / "socket")
        environment = _environment(host) | variables
        path = filter(None, [ahead and str(ahead), environment.get("PYTHONPATH"), str(ROOT)])
        environment["PYTHONPATH"] = os.pathsep.join(path)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm.server", address, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while (line := process.stdout.readline()) != b"ready\n":
                assert line, f"the process that preloads {host} ended"
            os.environ[ADDRESS] = address
            yield [sys.executable, "-S", str(Path(__file__).with_name("client.py"))]
        finally:
            os.environ.pop(ADDRESS, None)
            process.stdin.close()
            process.wait(20)


def _environment(host: str) -> dict[str, str]:
    if host == "vllm":
        from eagle_trace_vllm.deployment import cpu_environment as vllm_environment

        return vllm_environment(os.environ, 1)
    from sglang_cpu_eagle import cpu_environment

    return cpu_environment(os.environ)
