"""The process that forks: ``python -m tests.support.warm.server SOCKET HOST``, in the environment of HOST on a CPU.

It runs no tensor operation itself: a thread pool of torch's would be lost in the forked process and waited for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

#: what a host's processes import before they are ready
PRELOADED = {
    "sglang": (
        "sglang",
        "sglang.launch_server",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.speculative.eagle_worker_v2",
        "sglang.srt.models.registry",
        "sglang.srt.models.llama",
        "sglang.srt.models.llama_eagle3",
        "sglang.srt.layers.attention.intel_amx_backend",
        "transformers.models.llama.tokenization_llama",
        "eagle_trace_sglang.launch",
    ),
    "vllm": (
        "pandas",
        "pyarrow.parquet",
        "transformers.models.llama.tokenization_llama",
        "vllm",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.llama_eagle3",
        "vllm.model_executor.models.qwen3_eagle3",
    ),
}


_THREADS = os.environ.get("OMP_NUM_THREADS")


class _Job:
    """A module that runs: its process and the client that waits for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid

    def end(self) -> None:
        """Kill the process and all that is in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def main() -> NoReturn:
    """Import, listen, fork until the parent closes standard input."""
    for name in PRELOADED[sys.argv[2]]:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(8)
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for source in (listener, waking, 0):
        selector.register(source, selectors.EVENT_READ)
    jobs: dict[int, _Job] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                pid = _fork(connection, selector)
                jobs[pid] = _Job(connection, pid)
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj == waking:
                os.read(waking, 512)
                _reap(jobs, selector)
            elif key.fileobj == 0:
                for job in jobs.values():
                    job.end()
                os._exit(0)  # taking all of a host's modules down in order can last half a minute
            elif (job := jobs.get(key.data)) is not None:
                _hear(job, selector)


def _reap(jobs: dict[int, _Job], selector: selectors.BaseSelector) -> None:
    """Tell clients of processes that ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        job = jobs.pop(pid, None)
        if job is not None:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(job.connection)
            with contextlib.suppress(OSError):
                job.connection.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            job.connection.close()


def _hear(job: _Job, selector: selectors.BaseSelector) -> None:
    """Pass a signal on; a client that is gone takes its processes with it."""
    try:
        numbers = job.connection.recv(16)
    except OSError:
        numbers = b""
    if not numbers:
        selector.unregister(job.connection)
        job.end()
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, number)


def _fork(connection: socket.socket, selector: selectors.BaseSelector) -> int:
    """Take a job and run it in a process of its own."""
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = memoryview(ancillary[0][2]).cast("i").tolist()
    size, data = int.from_bytes(header, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    pid = os.fork()
    if pid == 0:
        _become(json.loads(data), streams, selector)
    for stream in streams:
        os.close(stream)
    return pid


def _become(job: dict[str, Any], streams: list[int], selector: selectors.BaseSelector) -> NoReturn:
    """Run the module as if this process had been started for it."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(selector.get_map().values()):
            if key.fd != 0:
                os.close(key.fd)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        _fill_memory()
        _take_threads()
        _take_path()
        # a host's own processes are forked as well, and load its plugins as spawned ones do
        if "vllm" in sys.modules:
            _fork_workers()
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_args, **_kwargs: None  # type: ignore[assignment]
        os.register_at_fork(after_in_child=_plugins_anew)
        module, *arguments = job["argv"]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (as the interpreter does at the end of a program)
        traceback.print_exc()
    try:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _fill_memory() -> None:
    """glibc reads ``MALLOC_PERTURB_`` when a program starts: tell it again."""
    if filling := os.environ.get("MALLOC_PERTURB_"):
        import ctypes

        ctypes.CDLL(None).mallopt(-6, int(filling))  # M_PERTURB


def _take_threads() -> None:
    """OpenMP reads ``OMP_NUM_THREADS`` when a program starts: tell it again."""
    count = os.environ.get("OMP_NUM_THREADS")
    if count and count != _THREADS:
        import torch

        torch.set_num_threads(int(count))


def _take_path() -> None:
    """What PYTHONPATH names comes first, as at the start of an interpreter, and so does its ``sitecustomize``."""
    ahead = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*ahead, *(part for part in sys.path if part not in ahead)]
    for part in ahead:
        if (file := Path(part) / "sitecustomize.py").is_file():
            runpy.run_path(str(file))
            return


def _plugins_anew() -> None:
    if "vllm" in sys.modules:
        from vllm import plugins

        plugins.plugins_loaded = False
    else:
        from sglang.srt import plugins

        plugins._plugins_loaded = False


def _fork_workers() -> None:
    """vLLM asks for spawned processes on a CPU, whatever it is told."""
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda *_args, **_kwargs: forking  # type: ignore[assignment]


if __name__ == "__main__":
    main()
