"""An armed server that answers as it should, but for the routes that a test gives an answer of its own.

`good_answers` says what it should; each answer is bytes on the wire, so that a test may send whatever it likes, as
slowly as it likes.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle_trace.contents import trace_files
from eagle_trace_serving.archive import pack

#: sends an answer; what it raises because the client hung up is passed over
Answer = Callable[[BaseHTTPRequestHandler], None]

NAME = "20260101-000000-abcd.trace"
TOKEN = "t" * 32


def says(body: Any, status: int = 200, **headers: str) -> Answer:
    """JSON, or bytes as they are."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        to.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            to.send_header(name.replace("_", "-"), value)
        to.end_headers()
        to.wfile.write(data)

    return answer


def slow(answer: Answer) -> Answer:
    """Mark an answer that only a client's impatience ends."""
    answer.slow = True  # type: ignore[attr-defined]
    return answer


def endless(block: bytes, pause: float = 0.0, head: bytes = b"") -> Answer:
    """A block after the other until the client has had enough."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        to.wfile.write(head)
        while True:
            to.wfile.write(block)
            to.wfile.flush()
            time.sleep(pause)

    return slow(answer) if pause else answer


def raw(head: bytes, block: bytes, pause: float = 0.0) -> Answer:
    """Bytes on the wire, then a block after the other until the client has had enough."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(head)
        while True:
            to.wfile.write(block)
            time.sleep(pause)

    return slow(answer) if pause else answer


@slow
def drips_headers(to: BaseHTTPRequestHandler) -> None:
    """The beginning of an answer, a letter at a time."""
    while True:
        to.wfile.write(b"H")
        time.sleep(0.05)


def breaks_off(data: bytes, *, chunked: bool) -> Answer:
    """An answer that announces more than it sends."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.protocol_version = "HTTP/1.1"
        to.send_response(200)
        to.send_header(*("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(2 * len(data))))
        to.end_headers()
        to.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
        to.close_connection = True

    return answer


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar as it comes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes = b"x", **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One member of `tar_of`."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in facts.items():
        setattr(info, key, value)
    return info, data


def packed(trace: Path) -> bytes:
    """A trace as a good server sends it."""
    return b"".join(pack(trace)[1])


def good_answers(trace: Path) -> dict[str, Answer]:
    """What a server that recorded `trace` answers, by method and path."""
    files = trace_files(trace)
    last = {"outcome": "sealed", "requests": 2, "rows": 9, "bytes": sum(files.values()), "files": len(files)}
    place = f"/there/{NAME}"
    ready = {"state": "ready", "out": None, "last": last | {"out": place}}
    return {
        "GET /eagle_trace": says({"state": "ready"}),
        "POST /eagle_trace/start": says(
            {"host": "sglang", "state": "recording", "out": place, "token": TOKEN, "server": {}}
        ),
        "POST /generate": says({"text": "", "meta_info": {"spec_verify_ct": 3}}),
        "POST /abort_request": says(b""),
        "POST /eagle_trace/finish": says(ready),
        f"GET /eagle_trace/traces/{NAME}": says(packed(trace)),
        f"DELETE /eagle_trace/traces/{NAME}": says({"state": "ready"}),
    }


@contextmanager
def serving(answers: dict[str, Answer]) -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """The server's address, and what it was asked: method and path, headers, body."""
    asked: list[tuple[str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            name = f"{self.command} {self.path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((name, {key.lower(): value for key, value in self.headers.items()}, body))
            with suppress(OSError):
                answers.get(name, says({"detail": "Not Found"}, 404))(self)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 (the names of the library)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
