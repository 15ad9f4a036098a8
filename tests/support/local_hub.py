"""A hub of one repository on this machine, for `check hf://owner/name`: an honest one, and such as are not."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME = "owner/draft"


@dataclass
class Hub:
    """What was asked of it, and how it answers.

    Attributes:
        folder: the repository's files.
        fault: in which way it is not honest; empty if it is.
        elsewhere: where a redirect goes to.
        asked: path and headers of each request.
        sent: bytes of files that it gave away.
    """

    folder: Path
    fault: str = ""
    elsewhere: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: int = 0
    url: str = ""
    #: ends what is slow
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def tokens(self) -> set[str]:
        """What was given as authorization."""
        return {headers.get("authorization", "") for _, headers in self.asked}


#: answers that are neither a list of files nor what a hub says of a repository
NONSENSE = {
    "html": b"<html>please sign in</html>", "half a list": b"[1, 2", "numbers": b"[1, 2]", "names": b'["config.json"]',
    "object": b'{"a": 1}', "entry": b'[{"type": "file"}]', "nulls": b"[null]", "number": b"1", "string": b'"files"',
    "empty": b"", "bytes": b"\xff\xfe\x00",
    "path": b'[{"type": "file", "path": 1, "size": 1, "oid": "1"}]',
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self.hub.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        path = self.path.split("?")[0]
        fault = self.hub.fault
        if fault == "silent" or (fault == "silent later" and "/resolve/" in path):
            self.hub.over.wait(30)
        elif fault in ("401", "403", "404", "429", "500"):
            self._answer(int(fault), b'{"error": "no"}')
        elif fault == "loop":
            self._redirect(f"{self.hub.url}{self.path}")
        elif "/resolve/" in path:
            self._file(path.rsplit("/", 1)[-1])
        elif "/tree/" in path:
            self._tree()
        else:
            found = {"id": NAME, "sha": "0" * 40, "siblings": [], "private": False, "disabled": False, "tags": []}
            self._answer(200, NONSENSE.get(fault.removeprefix("repository: "), json.dumps(found).encode()))

    def _tree(self) -> None:
        sizes = {file.name: file.stat().st_size for file in sorted(self.hub.folder.iterdir())}
        if self.hub.fault == "too small":
            sizes["model.safetensors"] -= 1000
        if self.hub.fault == "too large":
            sizes["config.json"] += 1000
        files: list[Any] = [{"type": "file", "path": name, "size": size, "oid": "1"} for name, size in sizes.items()]
        if self.hub.fault == "no sizes":
            files = [{**one, "size": "many"} for one in files]
        if self.hub.fault == "null":
            files = [{**one, "size": None} for one in files]
        if self.hub.fault == "negative":
            files = [{**one, "size": -1} for one in files]
        self._answer(200, NONSENSE.get(self.hub.fault.removeprefix("files: "), json.dumps(files).encode()))

    def _file(self, name: str) -> None:
        fault = self.hub.fault
        if fault in ("elsewhere", "from the endpoint"):
            self._redirect(f"{self.hub.elsewhere}/{name}")
            return
        data = (self.hub.folder / name).read_bytes()
        first, last = (int(one) for one in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        if fault == "whole files" and name.endswith("safetensors"):
            self._answer(200, data)
        elif fault == "more":
            self._answer(206, part + b"more")
        elif fault == "less":
            self._answer(206, part[:-1])
        elif fault == "endless":
            self.send_response(206)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.hub.over.wait(0):
                    self.wfile.write(b" " * 65536)
        elif fault == "cut off":
            self._answer(206, part[: len(part) // 2], length=len(part))
        elif fault == "dripping":
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            with contextlib.suppress(OSError):
                for byte in part:
                    if self.hub.over.wait(0.02):
                        return
                    self.wfile.write(bytes([byte]))
        elif fault == "compressed":
            self._answer(206, part, **{"Content-Encoding": "gzip"})
        elif fault == "zeros":
            self._answer(206, bytes(len(part)))
        else:
            self.hub.sent += len(part)
            self._answer(206, part)

    def _redirect(self, to: str) -> None:
        self.send_response(302)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a test's output is its own."""


@contextlib.contextmanager
def local_hub(folder: Path, fault: str = "", elsewhere: str = "") -> Iterator[Hub]:
    """A hub with one repository, `NAME`, while the block lasts."""
    hub = Hub(folder, fault, elsewhere)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def elapsed(since: float) -> float:
    """Seconds since a point of the monotonic clock."""
    return time.monotonic() - since
