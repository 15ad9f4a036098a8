"""Recording in a vLLM that its user started: armed by its environment, told over HTTP, and no worse for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.errors import HostError
from eagle_trace_analysis import diff
from eagle_trace_serving import process
from eagle_trace_serving.record import attach
from eagle_trace_vllm.deployment import cpu_environment
from tests.support.attached import START_SECONDS, reserved_port, wait_for
from tests.support.pairs import DRAFT, TARGET
from tests.support.warm.start import Warm
from tests.vllm.conftest import Train

pytestmark = pytest.mark.vllm

Ask = Callable[..., dict[str, Any]]


class Served:
    """A server as its user started it."""

    def __init__(self, port: int, running: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.running, self.log = f"http://127.0.0.1:{port}", running, log

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """What it answers to a POST."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    @property
    def status(self) -> Any:
        """What the recorder is doing."""
        return json.load(urllib.request.urlopen(f"{self.url}/eagle_trace"))

    def wait_until(self, state: str) -> None:
        """Wait for a state of the recorder."""
        wait_for(lambda: self.status["state"] == state, lambda: self.status)

    def complete(self, prompt: str, **more: Any) -> list[int]:
        """The token ids of a greedy answer."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        ids: list[int] = self.ask("/v1/completions", **body, **more)["choices"][0]["token_ids"]
        return ids

    def end(self) -> None:
        """Stop it as its user would, if it has not ended."""
        self.running.send_signal(signal.SIGTERM)
        self.running.wait(300)


@contextmanager
def serving(log: Path, **variables: str) -> Iterator[Served]:
    """The demo pair, compiled as vLLM does by default where `eager` is not said."""
    stack = ExitStack()
    port = stack.enter_context(reserved_port())
    speculation = {"model": str(DRAFT), "method": "eagle3", "num_speculative_tokens": 3}
    command = [
        *process.PYTHON, "vllm.entrypoints.openai.api_server", "--model", str(TARGET), "--dtype", "float32",
        "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--speculative-config", json.dumps(speculation),
    ]  # fmt: skip
    environment = cpu_environment(os.environ, 1) | variables
    with log.open("wb") as stream:
        running = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    served = Served(port, running, log)
    stack.callback(served.end)
    with stack:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert running.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{served.url}/health", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                time.sleep(0.3)
        yield served


@pytest.fixture(scope="module")
def armed(warm: Warm, folder: Path) -> Iterator[Served]:
    """A server that records its next two requests by itself."""
    with warm(), serving(folder / "armed.log", EAGLE_TRACE_OUT=str(folder / "armed"), EAGLE_TRACE_REQUESTS="2") as one:
        one.wait_until("recording")  # it serves before, if that takes long
        yield one


def sealed(folder: Path) -> list[Trace]:
    return [open_trace(path) for path in sorted(folder.glob("*.trace"))]


def test_its_next_requests_are_recorded_without_being_asked(armed: Served, folder: Path, train: Train) -> None:
    answers = [armed.complete("The return statement"), armed.complete("A list comprehension", request_id="mine")]
    armed.wait_until("ready")
    (trace,) = sealed(folder / "armed")
    assert [list(ids) for ids in trace.prompts["output_ids"]] == answers
    assert trace.prompts["request_id"][1] == "mine"
    result = diff(train(trace), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


def test_attach_records_texts_and_messages(armed: Served, folder: Path, train: Train) -> None:
    prompts = folder / "mixed.jsonl"
    lines = [{"prompt": "The return statement"}, {"input_ids": list(b"A generator yields")}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out = attach(url=armed.url, out=folder / "attached.trace", prompts=prompts, max_new_tokens=12)
    trace = open_trace(out)
    assert len(trace.prompts) == 2
    assert diff(train(trace), trace).verdict == "agree"


def test_what_is_being_recorded_is_sealed_when_the_server_ends(warm: Warm, folder: Path) -> None:
    place = folder / "ended"
    with warm(), serving(folder / "ended.log", EAGLE_TRACE_OUT=str(place)) as served:
        served.wait_until("recording")
        served.complete("The return statement")
        served.end()
    (trace,) = sealed(place)
    assert trace.manifest.stopped == "the server ended"
    assert len(trace.rows) > 0


def test_a_server_that_was_not_armed_answers_the_same_and_says_so_to_attach(
    warm: Warm, folder: Path, armed: Served, four_prompts: Path
) -> None:
    with warm(), serving(folder / "unarmed.log") as served:
        assert served.complete("The return statement") == armed.complete("The return statement")
        with pytest.raises(HostError, match="cannot record: install eagle-trace"):
            attach(url=served.url, out=folder / "none.trace", prompts=four_prompts)


def test_without_its_variable_the_plugin_imports_nothing() -> None:
    code = (
        "import sys; from eagle_trace_vllm.plugin import load; load();"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch', 'numpy')])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_TRACE")}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
