"""One HTTP exchange with a server that need not be a good one.

Only http and https are spoken, no redirect is followed, and answers are read within bounds.

The deadline holds for the whole exchange, from connecting to the last byte: a server that sends a byte every few
seconds is cut off like one that sends none.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from eagle_trace.errors import HostError, UsageError
from eagle_trace.printable import printable

#: JSON that is nested deeper than this is nobody's answer
DEEPEST = 32
ERROR_BYTES = 64 << 10
#: longer than anybody waits, and as long as a socket can
LONGEST_SECONDS = 1e6
#: bytes that are read at once
BLOCK_BYTES = 1 << 20
#: a server that means well says no more values than that: reading them takes far longer than reading text
BYTES_PER_VALUE = 8


class RefusedError(Exception):
    """An answer that is no success.

    Attributes:
        code: its status.
        text: the beginning of what it says, empty where that does not come.
        location: where it sends on to.
    """

    def __init__(self, code: int, text: bytes, location: str | None) -> None:
        super().__init__(code)
        self.code, self.text, self.location = code, text, location


class Deadline:
    """Cuts the connection when the time is up.

    Attributes:
        seconds: how long the exchange may take.
        expired: whether it took longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expired = False
        self._end = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.001, self._end - time.monotonic())

    def watch(self, one: socket.socket) -> None:
        """Cut this connection too; TLS that is put around it later does not matter."""
        with self._lock:
            self._sockets.append(one.dup())
        if self.expired:
            self._cut()

    def _cut(self) -> None:
        self.expired = True
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def check_address(url: str) -> str:
    """`url` without its last slash, if it is the address of a server.

    Raises:
        UsageError: it is not an http or https address, or holds a password.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url:
        raise UsageError(f"{quoted(url)} is not the address of a server: give one such as http://localhost:30000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            "the address of a server takes no user name, query or fragment: give one such as http://localhost:30000, "
            "and its key with --api-key"
        )
    return url.rstrip("/")


def check_key(key: str | None) -> str | None:
    """`key` without the line end that a file leaves behind it, if it can be sent.

    Raises:
        UsageError: it cannot; the message does not show it.
    """
    key = (key or "").strip() or None
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError("the API key that was given holds a character that no key has: is it quoted as it should be?")
    return key


@contextlib.contextmanager
def exchange(
    method: str, url: str, path: str, body: Any, headers: Mapping[str, str], seconds: float
) -> Iterator[HTTPResponse]:
    """The answer to one request, while it may be read.

    Raises:
        RefusedError: an answer that is no success, redirects among them.
        HostError: nobody answers there, not in time, or not to the end.
    """
    data = None if body is None else json.dumps(body).encode()
    seconds = min(seconds, LONGEST_SECONDS)
    with Deadline(seconds) as deadline:
        try:
            request = urllib.request.Request(url + path, data, dict(headers), method=method)
            with _opener(deadline).open(request, timeout=seconds) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = _beginning(error)  # here, where the deadline holds for it as well
            if deadline.expired:
                raise _late(url, path, seconds) from error
            raise RefusedError(error.code, text, error.headers.get("Location")) from error
        except Exception as error:
            if deadline.expired or isinstance(error, TimeoutError):
                raise _late(url, path, seconds) from error
            if not isinstance(error, OSError | HTTPException | ValueError):
                raise
            why = quoted(str(getattr(error, "reason", error)) or type(error).__name__)
            raise HostError(f"cannot reach {url} ({why}): is the server up, and the address right?") from error
        if deadline.expired:
            raise _late(url, path, seconds)


def _late(url: str, path: str, seconds: float) -> HostError:
    return HostError(f"{url} did not answer {path} within {seconds:.0f} s")


def _beginning(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(ERROR_BYTES)
    except (OSError, HTTPException, ValueError):
        return b""


class _Response(HTTPResponse):
    """An answer without chunks of negative length, each of which would be read to the end of the stream at once."""

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise ValueError(f"a chunk of {size} bytes")
        return size


def _opener(deadline: Deadline) -> urllib.request.OpenerDirector:
    """What opens http and https and follows nothing: a key must not travel to another server."""

    def timed(kind: type[HTTPConnection]) -> Callable[..., HTTPConnection]:
        def make(*arguments: Any, **options: Any) -> HTTPConnection:
            made = kind(*arguments, **options)
            made.response_class = _Response
            connect = made._create_connection  # type: ignore[attr-defined]

            def connected(address: Any, _timeout: Any = None, *more: Any) -> socket.socket:
                one: socket.socket = connect(address, deadline.left, *more)
                deadline.watch(one)
                return one

            made._create_connection = connected  # type: ignore[attr-defined]
            return made

        return make

    class Plain(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(timed(HTTPConnection), request)

    class Secure(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(timed(HTTPSConnection), request)

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        Plain(),
        Secure(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def read_json(response: Any, limit: int) -> Any:
    """The answer as JSON: at most `limit` bytes, not nested too deep, its numbers finite.

    Raises:
        ValueError: it is not that; the message is the reason in a few words.
    """
    data = bytearray()
    # block by block: of an answer in tiny chunks, each chunk is an object until the read is over
    while block := response.read(BLOCK_BYTES):
        data += block
        if len(data) > limit:
            raise ValueError(f"more than {limit} bytes")
    return parse_json(bytes(data), limit // BYTES_PER_VALUE)


def parse_json(data: bytes, most: int) -> Any:
    """`data` as JSON: at most `most` values, not nested deeper than `DEEPEST`, its numbers finite.

    Raises:
        ValueError: it is not that; the message is the reason in a few words.
    """
    # each value but the first stands behind one of these; counted before any of them takes memory and time
    if sum(map(data.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"more than {most} values")
    try:
        value = json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError("a number that is not finite")
        if not inner:
            return value
        level = inner
    raise ValueError("nested too deep")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def quoted(text: str, length: int = 300) -> str:
    """What a server said, fit for one line of a terminal."""
    return printable(" ".join(text[: 4 * length].split()))[:length]
