"""What a server makes of prompts, against training's tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.errors import HostError, PromptsError
from eagle_trace.jobs.tokens import compare_tokens
from tests.support.pairs import TARGET


class Server(BaseHTTPRequestHandler):
    """What SGLang and vLLM say to /tokenize."""

    answer: Any = None
    status = 200

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.answer(asked) if callable(self.answer) else self.answer
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(answer: Any, status: int = 200) -> str:
        handler = type("Handler", (Server,), {"answer": staticmethod(answer) if callable(answer) else answer})
        handler.status = status  # type: ignore[attr-defined]
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Bytes:
    """The demo target's tokenizer without transformers, which takes seconds to import."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, conversation: Any, **_: Any) -> list[int]:
        return [256, *"".join(one["content"] for one in conversation).encode()]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("eagle_trace.jobs.tokens.load_tokenizer", lambda _: Bytes())
    lines = [
        {"id": "text", "prompt": "Hello"},
        {"id": "chat", "messages": [{"role": "user", "content": "How are you?"}]},
        {"id": "ids", "input_ids": [1, 2, 3]},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "prompts.jsonl"


def as_trained(asked: dict[str, Any]) -> dict[str, Any]:
    """The demo target's template: a first token, and the messages' contents."""
    if "messages" in asked:
        text = "".join(one["content"] for one in asked["messages"])
        return {"tokens": [256, *text.encode()], "count": 1 + len(text)}
    return {"tokens": list(asked["prompt"].encode())}


def test_equal_tokens_on_both_sides_are_equal(serve: Any, prompts: Path) -> None:
    found = list(compare_tokens(TARGET, prompts, serve(as_trained)))
    assert [(one.key, one.at) for one in found] == [("text", None), ("chat", None)]


def test_the_command_says_what_a_servers_template_adds(serve: Any, prompts: Path) -> None:
    def with_system(asked: dict[str, Any]) -> dict[str, Any]:
        found = as_trained(asked)["tokens"]
        return {"tokens": [256, *b"system: be brief\n", *found[1:]] if "messages" in asked else found}

    result = CliRunner().invoke(
        app, ["tokens", "--target", str(TARGET), "--prompts", str(prompts), "--url", serve(with_system)]
    )
    assert result.exit_code == 1, result.output
    assert "differs: prompt 'chat', token 1 (13 in training, 30 in serving): serving has" in result.output
    assert "and training has not: a system prompt" in result.output
    assert "1 of 2 prompts differ" in result.output


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"tokens": "no"}, 200, "something that is no list of tokens"),
        ({"tokens": [1, -1]}, 200, "something that is no list of tokens"),
        ([1, 2], 200, "something that is no list of tokens"),
        (b"<html>", 200, "something that is no list of tokens"),
        ({}, 404, "has no /tokenize"),
        ({}, 401, "wants a key: give --api-key"),
        ({"message": "a\nb"}, 400, "refuses /tokenize with status 400"),
    ],
)
def test_a_server_that_gives_no_tokens_is_one_sentence(
    answer: Any, status: int, words: str, serve: Any, prompts: Path
) -> None:
    with pytest.raises(HostError, match=words) as caught:
        list(compare_tokens(TARGET, prompts, serve(answer, status)))
    assert "\n" not in str(caught.value)


def test_prompts_that_are_tokens_already_are_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [1]}')
    with pytest.raises(PromptsError, match="gives token ids alone"):
        list(compare_tokens(TARGET, tmp_path / "prompts.jsonl", "http://127.0.0.1:1"))
