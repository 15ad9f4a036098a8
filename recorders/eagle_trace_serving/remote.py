"""An armed server, reached over HTTP: what its recorder is told, what it is asked, and the traces it sends.

The server need not be a good one. Its answers are read within bounds, and what it sends as a trace goes into a folder
that nobody takes for a trace until it is whole and was opened. A place that it names is never opened.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from eagle_trace.errors import HostError, PromptsError, RecordingError, TraceError
from eagle_trace.reader import open_trace
from eagle_trace_serving.answers import STOPPED_LENGTH, TOKEN_HEADER, Ended, Told, understood
from eagle_trace_serving.archive import ArchiveError, unpack
from eagle_trace_serving.exchange import RefusedError, check_address, check_key, exchange, parse_json, quoted, read_json
from eagle_trace_serving.host import Ask

#: how long a server may take to say what it is doing, and to write a seal
STATUS_SECONDS = 30.0
#: how long it may take to hear that nobody waits for an answer any more
ABORT_SECONDS = 5.0
SEAL_SECONDS = 600.0
#: a trace comes at least this fast, or it does not come
FETCH_BYTES_PER_SECOND = 1 << 20
FETCH_SECONDS = 60.0
#: largest answer that is read: of the recorder, and to a prompt
TOLD_BYTES = 1 << 20
ANSWER_BYTES = 32 << 20


class UnarmedError(HostError):
    """Whoever answers there has no recorder."""


@dataclass(frozen=True)
class Remote:
    """A server reached over HTTP.

    Attributes:
        url: its address, e.g. ``http://localhost:30000``.
        api_key: what it was started with, or None.
        timeout: seconds that an answer may take.
        admin_api_key: what it was started with, or None; where there is none, `api_key` stands in for it.
        token: of the recording that was started here.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    admin_api_key: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", check_address(self.url))
        object.__setattr__(self, "api_key", check_key(self.api_key))
        object.__setattr__(self, "admin_api_key", check_key(self.admin_api_key))

    def status(self) -> Told:
        """What its recorder is doing.

        Raises:
            HostError: nobody answers there, or the server was not armed.
        """
        return self._told("GET", "/eagle_trace", None, STATUS_SECONDS)

    def start(self, body: dict[str, Any]) -> Told:
        """Begin to record (`bodies.StartBody`); raises RecordingError where the server refuses."""
        return self._told("POST", "/eagle_trace/start", body, SEAL_SECONDS)

    def finish(self, settings: dict[str, Any], stopped: str | None) -> Told:
        """End the recording and seal it."""
        body = {"settings": settings, "stopped": stopped and quoted(stopped, STOPPED_LENGTH)}
        return self._told("POST", "/eagle_trace/finish", body, SEAL_SECONDS)

    def ask(self, ask: Ask) -> Any:
        """The JSON that the server answers to a request of its own kind.

        Raises:
            PromptsError: the server refuses what was asked.
            HostError: it does not answer, or not that.
        """
        return self._json("POST", ask.path, ask.body, self.timeout, ANSWER_BYTES, admin=ask.admin)

    def abort(self, ask: Ask | None) -> bool:
        """Tell the server to give a request up, where it must be told; whether it has heard."""
        if ask is None:
            return True
        try:
            with self._open("POST", ask.path, ask.body, ABORT_SECONDS, admin=ask.admin):
                return True
        except (HostError, RecordingError, PromptsError):
            return False

    def fetch(self, name: str, ended: Ended, out: Path) -> None:
        """Put the files of the server's trace `name` into `out`, an empty folder that is nobody else's.

        Raises:
            HostError, RecordingError: it did not come, or is not a whole trace.
        """
        kept = f"it is still there, under the token {self.token}"
        free = shutil.disk_usage(out).free
        if ended.bytes > free:
            raise RecordingError(f"{name} has {ended.bytes} bytes and there is room for {free} beside {out}: {kept}")
        seconds = FETCH_SECONDS + ended.bytes / FETCH_BYTES_PER_SECOND
        try:
            with self._open("GET", f"/eagle_trace/traces/{name}", None, seconds) as response:
                came = unpack(response, out, max_bytes=ended.bytes, max_files=ended.files)
                _require_end(response)
        except (ArchiveError, HostError) as error:
            raise RecordingError(f"fetching {name} from {self.url} failed ({quoted(str(error))}); {kept}") from error
        try:
            files = open_trace(out).files
        except TraceError as error:
            damaged = str(error).replace(str(out), name)
        else:
            # the files themselves are not read: what they unfold to is as large as whoever made them likes
            damaged = ", ".join(one for one, facts in files.items() if facts.get("crc32", came[one]) != came[one])
        if damaged:
            raise RecordingError(f"what {self.url} sent of {name} is not a whole trace ({quoted(damaged)}); {kept}")

    def remove(self, name: str) -> None:
        """Remove the trace `name` from the server."""
        with self._open("DELETE", f"/eagle_trace/traces/{name}", None, STATUS_SECONDS):
            pass

    def _told(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Told:
        answer = self._json(method, path, body, seconds, TOLD_BYTES, admin=True)
        try:
            return understood(answer)
        except ValueError as error:
            raise self._nonsense(path, error) from None

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, limit: int, *, admin: bool
    ) -> Any:
        with self._open(method, path, body, seconds, admin=admin) as response:
            try:
                return read_json(response, limit)
            except ValueError as error:
                problem = error
        raise self._nonsense(path, problem)

    def _nonsense(self, path: str, error: ValueError) -> HostError:
        return HostError(
            f"{self.url} answered {path} with what no armed server says ({quoted(str(error), 80)}): "
            "is the address right, and eagle-trace of one version here and there?"
        )

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, *, admin: bool = True
    ) -> Iterator[HTTPResponse]:
        key = (self.admin_api_key or self.api_key) if admin else self.api_key
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if self.token and admin:
            headers[TOKEN_HEADER] = self.token
        try:
            with exchange(method, self.url, path, body, headers, seconds) as response:
                yield response
        except RefusedError as error:
            raise self._refused(path, error) from error

    def _refused(self, path: str, error: RefusedError) -> RecordingError | HostError | PromptsError:
        code, text, ours = error.code, error.text, path.startswith("/eagle_trace")
        if code == 401 and ours:
            return HostError(
                f"the server at {self.url} wants another key for recording: its admin key if it has one "
                "(--admin-api-key, or EAGLE_TRACE_ADMIN_API_KEY), else its API key (--api-key, or EAGLE_TRACE_API_KEY)"
            )
        if code in (401, 403) and not ours:
            return HostError(
                f"the server at {self.url} wants its API key for {path}: --api-key, or EAGLE_TRACE_API_KEY "
                "(its admin key is --admin-api-key)"
            )
        if ours and (said := _error_of(text)):
            return RecordingError(said)
        if code == 404 and ours:
            return UnarmedError(
                f"the server at {self.url} cannot record: install eagle-trace beside it, and start it with "
                "EAGLE_TRACE_OUT=FOLDER in its environment"
            )
        if 300 <= code < 400:
            there = quoted(error.location or "nowhere")
            return HostError(f"{self.url} sends on to {there}, which is not followed: give the address itself")
        kind = PromptsError if code == 400 else HostError
        return kind(f"the server at {self.url} answered {path} with {code}: {quoted(text.decode(errors='replace'))}")


def _require_end(response: HTTPResponse) -> None:
    """Refuse an answer that is shorter than it was to be, which reading it in pieces does not."""
    if response.length:
        raise ArchiveError("it broke off")


def _error_of(text: bytes) -> str:
    """The sentence in ``{"error": ...}``, or nothing."""
    with contextlib.suppress(ValueError):
        answer = parse_json(text, len(text))
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            return quoted(answer["error"])
    return ""
