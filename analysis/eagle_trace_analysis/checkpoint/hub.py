"""The hub of Hugging Face, asked with care: who gets the token, how long an answer may take, how large it may be.

`HfFileSystem` (huggingface_hub's filesystem for fsspec) knows the hub: its endpoint (``HF_ENDPOINT``), tokens
(``HF_TOKEN``, or what `hf auth login` left), revisions. Its HTTP client is replaced while it is used, by one that
follows these rules:

- the token goes to the endpoint alone; a redirect elsewhere (weights lie with a content network) is followed without
  it, and only to https or to the endpoint itself;
- an answer is as long as was asked for, or short; what is longer is not read;
- an error, and a server that is too slow, ends it: nothing is tried again for minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
from huggingface_hub import HfFileSystem, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from eagle_trace.errors import CheckpointError
from eagle_trace.printable import printable

#: how long a connection, or the next piece of an answer, may take; and an answer of nothing much [s]
QUIET_SECONDS, ANSWER_SECONDS = 10.0, 30.0
#: the slowest that a long answer may be [bytes/s]
SLOWEST = 200_000
#: the longest answer to a question that names no range
MOST_ANSWER = 32 << 20

_lock = threading.RLock()


class _StoppedError(CheckpointError):
    """A rule of this file was broken; its text is the sentence."""


def hub() -> Any:
    """A filesystem of fsspec's for the hub, each call of which keeps the rules above."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    return _Careful(HfFileSystem(endpoint=endpoint, skip_instance_cache=True))


class _Careful:
    """The two calls that are made of a filesystem, under the rules."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._client = Rules(filesystem.endpoint).client()

    def ls(self, path: str, detail: bool) -> Any:
        with self.rules():
            return self._filesystem.ls(path, detail=detail)

    def open(self, path: str, mode: str, cache_type: str) -> Any:
        with self.rules():
            return _CarefulFile(self, self._filesystem.open(path, mode, cache_type=cache_type))

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """huggingface_hub's HTTP client replaced for a while; it has one for all its users."""
        with _lock:
            set_client_factory(lambda: self._client)
            try:
                yield
            finally:
                set_client_factory(default_client_factory)


class _CarefulFile:
    def __init__(self, filesystem: _Careful, file: Any) -> None:
        self._filesystem, self._file = filesystem, file

    def __enter__(self) -> _CarefulFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, to: int) -> None:
        self._file.seek(to)

    def read(self, length: int) -> Any:
        with self._filesystem.rules():
            return self._file.read(length)


class Rules:
    """The rules for requests to one endpoint and the redirects it gives."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = httpx.URL(endpoint)

    def client(self, **options: Any) -> httpx.Client:
        """A client that keeps the rules."""
        hooks: dict[str, Any] = {"request": [self.leave], "response": [self.arrive]}
        return _Client(event_hooks=hooks, follow_redirects=True, timeout=QUIET_SECONDS, max_redirects=5, **options)

    def leave(self, request: httpx.Request) -> None:
        """A request, the first or one that a redirect asks for: to whom it goes, and with what."""
        request.headers["Accept-Encoding"] = "identity"
        if _origin(request.url) == _origin(self._endpoint):
            return
        for secret in ("Authorization", "Cookie"):
            request.headers.pop(secret, None)
        if request.url.scheme != "https":
            raise _StoppedError(
                f"the endpoint {self._endpoint} redirects to {printable(str(request.url.host))} over "
                f"{request.url.scheme}, which is not followed"
            )

    def arrive(self, response: httpx.Response) -> None:
        """The head of an answer: whether its body is to be read, and how much of it."""
        status, url = response.status_code, response.request.url
        if response.is_redirect:
            return
        if status == 429 or status >= 500:
            raise _StoppedError(f"{url.host} answers with status {status}: try again later")
        if status >= 400:
            raise _StoppedError(
                f"{url.host} has no such repository, revision or file, or keeps it from you (status {status}): is it "
                "private or gated, then run hf auth login or set HF_TOKEN"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _StoppedError(f"{url.host} sends a compressed answer that was not asked for")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", response.request.headers.get("Range", ""))
        most = int(asked[2]) - int(asked[1]) + 1 if asked else MOST_ANSWER
        said = response.headers.get("Content-Length", "")
        whole = asked is not None and asked[1] == "0" and said == str(most)
        if asked and status != 206 and not whole:
            raise _StoppedError(f"{url.host} does not serve parts of a file (status {status} where 206 was asked for)")
        if said.isdigit() and int(said) > most:
            raise _StoppedError(f"{url.host} answers with {int(said):,} bytes where {most:,} are the most")
        response.stream = _Counted(response.stream, most, url.host)


class _Client(httpx.Client):
    """A client whose failures are final: huggingface_hub asks again after httpx's own errors, for minutes.

    huggingface_hub closes its client whenever another takes its place; this one is used again.
    """

    def close(self) -> None:
        """Nothing: connections end with the object."""

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        host = request.url.host
        try:
            return super().send(request, **options)
        except httpx.TimeoutException as error:
            raise _StoppedError(f"{host} did not answer in time ({type(error).__name__})") from error
        except httpx.TooManyRedirects as error:
            raise _StoppedError(f"{host} redirects without end") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _StoppedError(f"{host} cannot be reached: {printable(str(error))}") from error


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


class _Counted(httpx.SyncByteStream):
    """A body that ends in an error where it is too long, or too slow."""

    def __init__(self, stream: Any, most: int, host: str) -> None:
        self._stream, self._most, self._host = stream, most, host

    def __iter__(self) -> Iterator[bytes]:
        seen, start = 0, time.monotonic()
        for piece in self._stream:
            seen += len(piece)
            if seen > self._most:
                raise _StoppedError(f"{self._host} sends more than the {self._most:,} bytes that were asked for")
            if time.monotonic() - start > ANSWER_SECONDS + seen / SLOWEST:
                raise _StoppedError(f"{self._host} is too slow: {seen:,} bytes in {time.monotonic() - start:.0f} s")
            yield piece

    def close(self) -> None:
        self._stream.close()
