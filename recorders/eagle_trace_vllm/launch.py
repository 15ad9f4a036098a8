"""The process that `record` starts: vLLM's own HTTP server, which ends with whoever started it.

Run as ``python -m eagle_trace_vllm.launch FILE``, FILE being a JSON file with `arguments` (vLLM's own command line).
It serves until standard input ends.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

#: the same in every release that is supported
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Serve the job named on the command line until standard input ends."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    threading.Thread(target=_end_with_input, name="eagle-trace-parent", daemon=True).start()
    sys.argv = [SERVER, *job["arguments"]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def _end_with_input() -> None:
    while os.read(0, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
