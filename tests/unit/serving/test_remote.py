"""What `record --attach` says of servers that cannot record, hang, or refuse; the server is a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.errors import EagleTraceError, HostError, RecordingError, UsageError
from eagle_trace.prompts import Prompt
from eagle_trace_serving.client import Question, ask_all
from eagle_trace_serving.host import Ask
from eagle_trace_serving.record import attach
from eagle_trace_serving.remote import Remote
from eagle_trace_serving.requests import Request
from eagle_trace_sglang.host import HOST

READY = {"host": "sglang", "state": "ready", "last": {}, "server": {}}


@contextmanager
def standing_in(**routes: Any) -> Iterator[str]:
    """A server with ``METHOD_path`` routes, each (status, body, whether it never comes)."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            name = f"{self.command}{self.path.replace('/', '_')}"
            status, body, hangs = routes.get(name, (404, {"detail": "Not Found"}, False))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if hangs:
                over.wait()
                return
            data = json.dumps(body).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 (the names of the library)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()


def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return path


def test_a_server_that_was_not_armed_is_named_with_the_way_out(tmp_path: Path) -> None:
    with standing_in() as url, pytest.raises(HostError, match="EAGLE_TRACE_OUT=FOLDER"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")
    assert not (tmp_path / "s.trace").exists()


def test_an_api_key_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    refused = (401, {"error": "Unauthorized"}, False)
    with standing_in(GET_eagle_trace=refused) as url, pytest.raises(HostError, match="--api-key"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")


def test_what_the_server_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    routes = {"GET_eagle_trace": (200, READY, False), "POST_eagle_trace_start": (409, {"error": "busy with x"}, False)}
    with standing_in(**routes) as url, pytest.raises(RecordingError, match=r"^busy with x$"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")


def test_answers_that_never_come_end_the_recording_and_not_the_patience(tmp_path: Path) -> None:
    routes = {
        "GET_eagle_trace": (200, READY, False),
        "POST_eagle_trace_start": (200, READY | {"out": "/there/x.trace"}, False),
        "POST_generate": (200, {"text": ""}, True),
        "POST_eagle_trace_finish": (200, READY, False),
    }
    with standing_in(**routes) as url, pytest.raises(HostError, match="did not answer /generate within 0 s"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace", timeout=0.3)


def test_a_recording_that_failed_on_the_server_is_no_success(tmp_path: Path) -> None:
    failed = READY | {"last": {"outcome": "failed", "why": "No space left on device"}}
    routes = {
        "GET_eagle_trace": (200, READY, False),
        "POST_eagle_trace_start": (200, READY | {"out": "/there/x.trace"}, False),
        "POST_generate": (200, {"text": "", "meta_info": {}}, False),
        "POST_eagle_trace_finish": (200, failed, False),
    }
    with standing_in(**routes) as url, pytest.raises(RecordingError, match="No space left on device"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")


@pytest.mark.parametrize("url", ["localhost:30000", "http://127.0.0.1:9", "nonsense", "ftp://x"])
def test_an_address_nobody_answers_at(url: str, tmp_path: Path) -> None:
    with pytest.raises(EagleTraceError, match="address"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")


def test_lines_cannot_be_chosen_without_a_prompts_file(tmp_path: Path) -> None:
    from eagle_trace.selection import Selection

    with pytest.raises(UsageError, match="--prompts"):
        attach(url="http://x", out=tmp_path / "s.trace", selection=Selection.parse(prompts="0"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mode", "train"], "belongs to record --mode serve"),
        (["--draft", "d"], "has its target, draft and arguments already"),
        (["--only-prompts", "0"], "--prompts"),
        (["--sample", "2"], "share of requests"),
        (["--requests", "0"], "1 or more"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], words: str, tmp_path: Path) -> None:
    with standing_in(GET_eagle_trace=(200, READY, 0)) as url:
        command = ["record", "--mode", "serve", "--attach", url, "--out", str(tmp_path / "s.trace"), *options]
        run = CliRunner().invoke(app, command)
    assert run.exit_code == 2
    assert words in run.output
    assert not (tmp_path / "s.trace").exists()


def test_who_is_interrupted_does_not_wait_for_answers_nobody_will_read() -> None:
    class Slow(Remote):
        """Answers the first prompt at once, and the others when they are given up."""

        def ask(self, ask: Ask) -> Any:
            if ask.body["rid"] != "eagle-trace-0":
                assert given_up.wait(30), "the request was never given up"
            return {}

        def abort(self, ask: Ask | None) -> bool:
            assert ask is not None
            aborted.append(ask.body["rid"])
            given_up.set()
            return True

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    aborted: list[str] = []
    given_up = threading.Event()
    request = Request([Prompt(key=text, text=text) for text in ("one", "two")])
    asks = [HOST.ask(prompt, rid, request) for prompt, rid in zip(request.prompts, request.rids, strict=True)]
    questions = [Question((ask.body["rid"],), ask) for ask in asks]
    with pytest.raises(KeyboardInterrupt):
        ask_all(Slow("http://nowhere"), HOST, questions, 8, interrupt)
    assert aborted == ["eagle-trace-1"]


def test_a_server_is_asked_as_its_program_wants_it(tmp_path: Path) -> None:
    routes = {
        "GET_eagle_trace": (200, READY, False),
        "POST_eagle_trace_start": (200, READY | {"out": "/there/x.trace", "host": "another"}, False),
        "POST_eagle_trace_finish": (200, READY, False),
    }
    with standing_in(**routes) as url, pytest.raises(UsageError, match="no server is called 'another'"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")


def test_a_server_that_does_not_say_what_it_is_must_be_named(tmp_path: Path) -> None:
    said = {name: value for name, value in READY.items() if name != "host"}
    routes = {
        "GET_eagle_trace": (200, said, False),
        "POST_eagle_trace_start": (200, said | {"out": "/there/x.trace"}, False),
        "POST_eagle_trace_finish": (200, said, False),
    }
    with standing_in(**routes) as url, pytest.raises(HostError, match="name it with --host"):
        attach(url=url, prompts=prompts(tmp_path), out=tmp_path / "s.trace")
