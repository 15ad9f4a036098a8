"""`record --mode serve --attach URL`: ask a server that somebody else started, and fetch what it recorded.

The server need not be a good one. Its answers are read within bounds, and what it sends as a trace goes into a folder
that nobody takes for a trace until it is whole and was opened. A place that it names is never opened.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from eagle_trace.errors import HostError, PromptsError, RecordingError, TraceError
from eagle_trace.prompts import Prompt, check_tokens
from eagle_trace.reader import open_trace
from eagle_trace_serving.answers import Ended, Told, understood
from eagle_trace_serving.archive import ArchiveError, unpack
from eagle_trace_serving.exchange import RefusedError, check_address, check_key, exchange, parse_json, quoted, read_json
from eagle_trace_serving.requests import Request, speculation

#: how long a server may take to say what it is doing, and to write a seal
STATUS_SECONDS = 30.0
#: how long it may take to hear that nobody waits for an answer any more
ABORT_SECONDS = 5.0
SEAL_SECONDS = 600.0
POLL_SECONDS = 0.5
RENEW_SECONDS = 5.0
#: a trace comes at least this fast, or it does not come
FETCH_BYTES_PER_SECOND = 1 << 20
FETCH_SECONDS = 60.0
#: how long after its time limit a server may still be recording
GRACE_SECONDS = 60.0
#: largest answer that is read: of the recorder, and to a prompt
TOLD_BYTES = 1 << 20
ANSWER_BYTES = 32 << 20
#: letters of a reason that a server takes (`bodies.FinishBody`)
STOPPED_LENGTH = 500
#: says whose recording it is; the server gives it to whoever starts one
TOKEN_HEADER = "X-Eagle-Trace-Token"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Remote:
    """An SGLang server reached over HTTP.

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

    def generate(self, prompt: Prompt, rid: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Have one prompt answered; returns ``meta_info`` as far as the server says it.

        A text or token ids go to ``/generate``; messages to ``/v1/chat/completions``, where the server applies its own
        chat template.
        """
        if prompt.messages is not None:
            body = {
                "model": "default",
                "messages": list(prompt.messages),
                "rid": rid,
                "temperature": sampling["temperature"],
                "max_tokens": sampling["max_new_tokens"],
            }
            self._json("POST", "/v1/chat/completions", body, self.timeout, ANSWER_BYTES)
            return {}
        given = {"text": prompt.text} if prompt.input_ids is None else {"input_ids": list(prompt.input_ids)}
        asked = given | {"rid": rid, "sampling_params": sampling}
        answer = self._json("POST", "/generate", asked, self.timeout, ANSWER_BYTES)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        return meta if isinstance(meta, dict) else {}

    def abort(self, rid: str) -> bool:
        """Tell the server to give a request up; whether it has heard."""
        try:
            with self._open("POST", "/abort_request", {"rid": rid}, ABORT_SECONDS):
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

    def _told(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> Told:
        answer = self._json(method, path, body, seconds, TOLD_BYTES)
        try:
            return understood(answer)
        except ValueError as error:
            raise self._nonsense(path, error) from None

    def _json(self, method: str, path: str, body: dict[str, Any] | None, seconds: float, limit: int) -> Any:
        with self._open(method, path, body, seconds) as response:
            try:
                return read_json(response, limit)
            except ValueError as error:
                problem = error
        raise self._nonsense(path, problem)

    def _nonsense(self, path: str, error: ValueError) -> HostError:
        return HostError(
            f"{self.url} answered {path} with what no armed SGLang says ({quoted(str(error), 80)}): "
            "is the address right, and eagle-trace of one version here and there?"
        )

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> Iterator[HTTPResponse]:
        ours = path.startswith(("/eagle_trace", "/abort_request"))
        key = (self.admin_api_key or self.api_key) if ours else self.api_key
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if self.token and ours:
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
            return HostError(
                f"the server at {self.url} cannot record: install eagle-trace beside SGLang and start the server with "
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


@dataclass(frozen=True)
class Recorded:
    """What `record_attached` brought about.

    Attributes:
        name: of the trace on the server.
        ended: how the recording ended, in the server's words.
        url: where the trace stays, as the server says it: to be told and not to be opened. None if it was fetched.
    """

    name: str
    ended: Ended
    url: str | None = None


def record_attached(
    remote: Remote,
    out: Path,
    *,
    request: Request | None,
    options: dict[str, Any],
    progress: Progress = lambda _: None,
) -> tuple[Remote, Recorded]:
    """Record in a running server and fetch the trace, unless it has no row or the server keeps it elsewhere.

    Args:
        remote: the server.
        out: empty folder for the trace, nobody else's.
        request: prompts to send; None to record what others ask.
        options: fields of `bodies.StartBody`.
        progress: told what is going on.

    Returns:
        The server as it knows the one who started the recording, and what was recorded.

    Raises:
        HostError: the server cannot be reached or was not armed.
        RecordingError: the recording failed, or the server is recording already.
    """
    if request is not None:
        _check_prompts(request, remote.status())
        named = {rid: [number, request.prompts[number].key] for number, rid in enumerate(request.rids)}
        options = options | {"named": named, "settings": request.settings | options.get("settings", {})}
    told = remote.start(options)
    if told.place is None:
        raise HostError(f"{remote.url} says that it records, and not what: is it another version of eagle-trace?")
    remote, name, place = replace(remote, token=told.token), told.name, told.place
    progress(f"recording at {remote.url} into {place}")
    settings: dict[str, Any] = {}
    stopped: str | None = None
    try:
        if request is not None:
            _check_prompts(request, told)  # a server without keys tells only whoever records
            settings, stopped = _ask(remote, request, progress)
        else:
            told = _wait_for_others(remote, options.get("seconds"), progress)
    except BaseException:
        # what was recorded up to here is whole, and stays on the server
        with contextlib.suppress(HostError, RecordingError):
            ended = remote.finish({}, "record was interrupted").last
            if ended.rows:
                progress(f"the server keeps what was recorded up to here: {place} (token {remote.token})")
        raise
    if request is not None:
        told = remote.finish(settings, stopped)
    ended = told.last
    if ended.outcome != "sealed":
        raise RecordingError(f"the recording failed, SGLang did not: {ended.why or 'nothing is known of it'}")
    if "://" in place:
        return remote, Recorded(name, ended, place)
    if ended.rows:
        progress(f"fetching {place}")
        remote.fetch(name, ended, out)
    return remote, Recorded(name, ended)


def _check_prompts(request: Request, told: Told) -> None:
    """Refuse token ids that this server's target cannot take: they would not be refused there, but kill it."""
    for prompt in request.prompts:
        if prompt.input_ids is not None:
            check_tokens(prompt.key, prompt.input_ids, told.server, request.max_new_tokens)


def _ask(remote: Remote, request: Request, progress: Progress) -> tuple[dict[str, Any], str | None]:
    """Send all prompts, so many at a time; the server's counts, and what kept it from answering all of them."""
    counts: dict[str, dict[str, float]] = {}
    started = renewed = time.monotonic()
    waiting = list(zip(request.rids, request.prompts, strict=True))
    running: dict[Future[dict[str, Any]], str] = {}
    unanswered: list[HostError | PromptsError] = []
    try:
        while waiting or running:
            while waiting and len(running) < request.batch_size:
                rid, prompt = waiting.pop(0)
                running[_begun(partial(remote.generate, prompt, rid, request.sampling))] = rid
            done, _ = wait(running, RENEW_SECONDS, return_when=FIRST_COMPLETED)
            if time.monotonic() - renewed >= RENEW_SECONDS:
                renewed = time.monotonic()
                with contextlib.suppress(HostError, RecordingError):
                    # also tells the server that somebody still waits
                    if remote.status().state != "recording":
                        waiting.clear()  # a limit was reached: what is still asked would be recorded nowhere
            for future in done:
                rid = running.pop(future)
                try:
                    meta = future.result()
                except (HostError, PromptsError) as error:
                    # a request that never ends or is refused, a server that is gone: keep the others' rows
                    unanswered.append(error)
                    remote.abort(rid)
                    continue
                counts[rid] = speculation(meta)
                seconds = time.monotonic() - started
                progress(f"{len(counts)} of {len(request.prompts)} prompts answered, {seconds:.0f} s")
    finally:
        # after an interruption: requests that nobody waits for any more
        for rid in running.values():
            if not remote.abort(rid):
                break
    if len(unanswered) == len(request.prompts):
        raise type(unanswered[0])(f"no prompt was answered: {unanswered[0]}")
    counts = {rid: counted for rid, counted in counts.items() if counted}
    why = (
        f"{len(unanswered)} of {len(request.prompts)} prompts were not answered: {unanswered[0]}"
        if unanswered
        else None
    )
    return {"server_counts": counts}, why


def _begun(ask: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    """What `ask` will return, from a thread that keeps nobody from ending the program: a server may never answer."""
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name="eagle-trace-ask", daemon=True).start()
    return future


def _wait_for_others(remote: Remote, seconds: float | None, progress: Progress) -> Told:
    """Wait until the server has recorded the requests of others, and sealed."""
    said, started = "", time.monotonic()
    while (told := remote.status()).state == "recording":
        text = f"{told.ended} of {told.requests} requests recorded"
        if text != said:
            progress(text)
            said = text
        if seconds is not None and time.monotonic() - started > seconds + GRACE_SECONDS:
            raise HostError(f"{remote.url} still records, {GRACE_SECONDS:.0f} s after its time limit of {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return told
