"""An SGLang server as its user starts it, with eagle-trace beside it; only the kernels for the CPU are ours."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 400


@dataclass(frozen=True)
class Attached:
    """A running server, its log, and where it puts its traces."""

    url: str
    log: Path
    out: Path
    process: subprocess.Popen[bytes]
    api_key: str | None = None
    admin_api_key: str | None = None

    @property
    def reach(self) -> dict[str, Any]:
        """What `attach` needs to reach it."""
        return {"url": self.url, "api_key": self.api_key, "admin_api_key": self.admin_api_key}

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 300, **headers: str) -> bytes:
        """Answer of a route, by the key that it takes unless `headers` say another."""
        with self._open(method, path, body, timeout, **headers) as stream:
            return bytes(stream.read())

    def _open(self, method: str, path: str, body: Any, timeout: float, **headers: str) -> Any:
        admin = path.startswith(("/eagle_trace", "/abort_request", "/pause_generation", "/continue_generation"))
        if key := self.admin_api_key if admin else self.api_key:
            headers = {"Authorization": f"Bearer {key}"} | headers
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return urllib.request.urlopen(request, timeout=timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> Any:
        """Answer of a route."""
        text = self.ask("POST", path, body, timeout=timeout)
        return json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()

    def generate(
        self,
        text: str,
        rid: str | None = None,
        tokens: int = 16,
        *,
        begun: Callable[[], object] | None = None,
        **sampling: Any,
    ) -> Any:
        """Answer to one prompt; `begun` is called when the first of it is there."""
        body: dict[str, Any] = {
            "text": text,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0} | sampling,
        }
        body |= {"rid": rid} if rid else {}
        if begun is None:
            return self.post("/generate", body)
        answer = None
        with self._open("POST", "/generate", body | {"stream": True}, 300) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    begun()
                    answer = json.loads(line.removeprefix(b"data: "))
        return answer

    @property
    def processes(self) -> list[psutil.Process]:
        """All that write to its log: SGLang's main process and those it started, whoever they were forked from."""
        return [process for process in psutil.process_iter() if _writes_to(process, self.log)]

    @property
    def status(self) -> Any:
        """What the recorder is doing."""
        return json.loads(self.ask("GET", "/eagle_trace", timeout=60))

    @property
    def traces(self) -> list[Path]:
        """Places of the traces that lie on the server; of two that began in one second, either may come first."""
        return sorted(self.out.glob("*.trace")) if self.out.is_dir() else []

    def wait_until(self, state: str, seconds: float = 300) -> None:
        """Wait for a state of the recorder."""
        wait_for(lambda: self.status["state"] == state, lambda: self.status, seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is computed meanwhile, so that no request ends; the recorder goes on listening."""
        self.post("/pause_generation", {"mode": "in_place"})
        try:
            yield
        finally:
            self.post("/continue_generation", {})


def wait_for(condition: Callable[[], object], words: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition holds; `words` say what is the case where it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, words()
        time.sleep(0.05)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that a server may listen at, and which nobody is given by chance meanwhile."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        yield int(one.getsockname()[1])


@contextmanager
def server(
    folder: Path,
    target: Path,
    draft: Path,
    *arguments: str,
    dtype: str = "float32",
    api_key: str | None = None,
    admin_api_key: str | None = None,
    **variables: str,
) -> Iterator[Attached]:
    """`python -m sglang.launch_server` with ``EAGLE_TRACE_OUT`` and `variables` in its environment.

    A variable that is empty is not set. Within ``with warm():`` it starts in seconds (`tests.support.warm`).
    """
    from eagle_trace_serving import process as host
    from sglang_cpu_eagle import cpu_environment

    log, out = folder / "server.log", folder / "recorded"
    stack = ExitStack()
    port = stack.enter_context(reserved_port())
    command = [*host.PYTHON, "sglang.launch_server", "--port", str(port), "--model-path", str(target)]
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    command += ["--speculative-num-steps", "3", "--dtype", dtype, "--device", "cpu"]
    command += ["--attention-backend", "intel_amx", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192"]
    command += ["--sleep-on-idle", *arguments]
    command += ["--api-key", api_key] if api_key else []
    command += ["--admin-api-key", admin_api_key] if admin_api_key else []
    environment = cpu_environment(os.environ) | {"EAGLE_TRACE_OUT": str(out)} | variables
    environment = {name: value for name, value in environment.items() if value or name not in variables}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    stack.callback(stop, process)
    attached = Attached(f"http://127.0.0.1:{port}", log, out, process, api_key, admin_api_key)
    with stack:
        end = time.monotonic() + START_SECONDS
        while b"fired up" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield attached


def _writes_to(process: psutil.Process, log: Path) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == str(log)  # noqa: PTH115 (the target need not exist)
    except OSError:
        return False


def seconds_to_end(running: Attached, limit: float = 300.0) -> float:
    """End a server by SIGTERM: seconds from when SGLang sees that nothing is left to answer until all of it is gone.

    It looks for the signal every five seconds only, so seconds from the signal on would be nothing to compare.
    """
    tree = running.processes
    running.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + limit
    while b"Remaining number of requests 0" not in running.log.read_bytes():
        assert time.monotonic() < end, running.log.read_text()[-3000:]
        time.sleep(0.02)
    started = time.monotonic()
    _, alive = psutil.wait_procs(tree, timeout=max(0.0, end - started))
    assert not alive, alive
    return time.monotonic() - started


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and everything it started."""
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in tree:
        if child.is_running():
            child.kill()
    psutil.wait_procs(tree, timeout=10)
