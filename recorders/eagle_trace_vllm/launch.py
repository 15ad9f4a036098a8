"""The process that `record` starts: vLLM's own HTTP server. Its job has `arguments`, vLLM's own command line."""

from __future__ import annotations

import os
import runpy
import signal
import sys

from eagle_trace_serving.launching import take_job

#: the same in every release that is supported
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Serve the job named on the command line until standard input ends."""
    job = take_job(lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = [SERVER, *job["arguments"]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
