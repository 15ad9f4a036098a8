"""`record --mode serve --attach URL`: ask a server that somebody else started, and fetch what it recorded."""

from __future__ import annotations

import contextlib
import json
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

from eagle_trace.errors import HostError, PromptsError, RecordingError
from eagle_trace.prompts import Prompt, check_tokens
from eagle_trace.reader import open_trace
from eagle_trace.store import Place, is_url
from eagle_trace_sglang.requests import Request, speculation

#: how long a server may take to say what it is doing, and to write a seal
STATUS_SECONDS = 30.0
SEAL_SECONDS = 600.0
POLL_SECONDS = 0.5
RENEW_SECONDS = 5.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Remote:
    """An SGLang server reached over HTTP.

    Attributes:
        url: its address, e.g. ``http://localhost:30000``.
        api_key: what it was started with, or None.
        timeout: seconds that an answer may take.
    """

    url: str
    api_key: str | None = None
    timeout: float = 600.0

    def status(self) -> dict[str, Any]:
        """What its recorder is doing.

        Raises:
            HostError: nobody answers there, or the server was not armed.
        """
        return self._json("GET", "/eagle_trace", None, STATUS_SECONDS)

    def start(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to record (`routes.StartBody`); raises RecordingError where the server refuses."""
        return self._json("POST", "/eagle_trace/start", body, SEAL_SECONDS)

    def finish(self, settings: dict[str, Any], stopped: str | None) -> dict[str, Any]:
        """End the recording and seal it."""
        return self._json("POST", "/eagle_trace/finish", {"settings": settings, "stopped": stopped}, SEAL_SECONDS)

    def generate(self, prompt: Prompt, rid: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Answer one prompt: ``output_ids``, ``text`` and ``meta_info`` as far as the server says them.

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
            answer = self._json("POST", "/v1/chat/completions", body, self.timeout)
            return {"output_ids": [], "text": answer["choices"][0]["message"]["content"] or "", "meta_info": {}}
        given = {"text": prompt.text} if prompt.input_ids is None else {"input_ids": list(prompt.input_ids)}
        return self._json("POST", "/generate", given | {"rid": rid, "sampling_params": sampling}, self.timeout)

    def abort(self, rid: str) -> None:
        """Tell the server to give a request up."""
        with contextlib.suppress(HostError, RecordingError):
            self._json("POST", "/abort_request", {"rid": rid}, STATUS_SECONDS)

    def fetch(self, name: str, out: Path) -> None:
        """Unpack the server's trace `name` into the folder `out`, then remove it from the server."""
        path = f"/eagle_trace/traces/{name}"
        with self._open("GET", path, None, SEAL_SECONDS) as stream:
            try:
                with tarfile.open(mode="r|", fileobj=stream) as archive:
                    archive.extractall(out, filter="data")
            except (tarfile.TarError, OSError, HTTPException) as error:
                raise RecordingError(f"fetching {name} from {self.url} failed ({error}); it is still there") from error
        open_trace(out)  # whole, or it stays on the server
        self._json("DELETE", path, None, STATUS_SECONDS)

    def _json(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        with self._open(method, path, body, timeout) as stream:
            text = stream.read()
        try:
            answer = json.loads(text) if text.strip() else {}
        except ValueError:
            return {"text": text.decode(errors="replace")}
        return answer if isinstance(answer, dict) else {"answer": answer}

    def _open(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> BinaryIO:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from error
        except TimeoutError as error:
            raise HostError(f"{self.url} did not answer {path} within {timeout:.0f} s") from error
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise HostError(f"cannot reach {self.url} ({why}): is the server up, and the address right?") from error

    def _refused(self, path: str, error: urllib.error.HTTPError) -> RecordingError | HostError | PromptsError:
        text = error.read().decode(errors="replace")
        if error.code == 409:
            with contextlib.suppress(ValueError, KeyError):
                return RecordingError(json.loads(text)["error"])
        if error.code == 404 and path.startswith("/eagle_trace"):
            return HostError(
                f"the server at {self.url} cannot record: install eagle-trace beside SGLang and start the server with "
                "EAGLE_TRACE_OUT=FOLDER in its environment"
            )
        if error.code in (401, 403):
            return HostError(f"the server at {self.url} wants its API key: --api-key, or EAGLE_TRACE_API_KEY")
        kind = PromptsError if error.code == 400 else HostError
        return kind(f"the server at {self.url} answered {path} with {error.code}: {text.strip()[:300]}")


def record_attached(
    remote: Remote,
    out: Path,
    *,
    request: Request | None,
    options: dict[str, Any],
    progress: Progress = lambda _: None,
) -> Place:
    """Record in a running server and return where the trace is: `out`, or the server's own place.

    Args:
        remote: the server.
        out: empty folder for the trace.
        request: prompts to send; None to record what others ask.
        options: fields of `routes.StartBody`.
        progress: told what is going on.

    Raises:
        HostError: the server cannot be reached or was not armed.
        RecordingError: the recording failed, or the server is recording already.
    """
    status = remote.status()
    if request is not None:
        _check_prompts(request, status["server"])
        named = {rid: [number, request.prompts[number].key] for number, rid in enumerate(request.rids)}
        options = options | {"named": named, "settings": request.settings | options.get("settings", {})}
    place = remote.start(options)["out"]
    progress(f"recording at {remote.url} into {place}")
    settings: dict[str, Any] = {}
    stopped: str | None = None
    try:
        if request is not None:
            settings, stopped = _ask(remote, request, progress)
        else:
            status = _wait_for_others(remote, progress)
    except BaseException:
        # what was recorded up to here is whole, and stays on the server
        with contextlib.suppress(HostError, RecordingError):
            remote.finish({}, "record was interrupted")
            progress(f"the server keeps what was recorded up to here: {place}")
        raise
    if request is not None:
        status = remote.finish(settings, stopped)
    return _collect(remote, status, out, progress)


def _check_prompts(request: Request, server: Mapping[str, Any]) -> None:
    """Refuse token ids that this server's target cannot take: they would not be refused there, but kill it."""
    config = {"vocab_size": server.get("vocab_size"), "max_position_embeddings": server.get("context_length")}
    for prompt in request.prompts:
        if prompt.input_ids is not None:
            check_tokens(prompt.key, prompt.input_ids, config, request.max_new_tokens)


def _ask(remote: Remote, request: Request, progress: Progress) -> tuple[dict[str, Any], str | None]:
    """Send all prompts, so many at a time; the server's counts, and what kept it from answering all of them."""
    counts: dict[str, dict[str, float]] = {}
    started = renewed = time.monotonic()
    waiting = list(zip(request.rids, request.prompts, strict=True))
    running: dict[Future[dict[str, Any]], str] = {}
    unanswered: list[HostError | PromptsError] = []
    pool = ThreadPoolExecutor(request.batch_size)
    try:
        while waiting or running:
            while waiting and len(running) < request.batch_size:
                rid, prompt = waiting.pop(0)
                running[pool.submit(remote.generate, prompt, rid, request.sampling)] = rid
            done, _ = wait(running, RENEW_SECONDS, return_when=FIRST_COMPLETED)
            if time.monotonic() - renewed >= RENEW_SECONDS:
                renewed = time.monotonic()
                with contextlib.suppress(HostError, RecordingError):
                    # also tells the server that somebody still waits
                    if remote.status()["state"] != "recording":
                        waiting.clear()  # a limit was reached: what is still asked would be recorded nowhere
            for future in done:
                rid = running.pop(future)
                try:
                    answer = future.result()
                except (HostError, PromptsError) as error:
                    # a request that never ends or is refused, a server that is gone: keep the others' rows
                    unanswered.append(error)
                    remote.abort(rid)
                    continue
                counts[rid] = speculation(answer.get("meta_info") or {})
                seconds = time.monotonic() - started
                progress(f"{len(counts)} of {len(request.prompts)} prompts answered, {seconds:.0f} s")
    finally:
        # after an interruption: requests that nobody waits for any more
        for rid in running.values():
            remote.abort(rid)
        pool.shutdown(wait=False, cancel_futures=True)
    if len(unanswered) == len(request.prompts):
        raise type(unanswered[0])(f"no prompt was answered: {unanswered[0]}")
    counts = {rid: counted for rid, counted in counts.items() if counted}
    why = (
        f"{len(unanswered)} of {len(request.prompts)} prompts were not answered: {unanswered[0]}"
        if unanswered
        else None
    )
    return {"server_counts": counts}, why


def _wait_for_others(remote: Remote, progress: Progress) -> dict[str, Any]:
    """Wait until the server has recorded the requests of others, and sealed."""
    said = ""
    while (status := remote.status())["state"] == "recording":
        text = f"{status.get('ended', 0)} of {status.get('requests', 0)} requests recorded"
        if text != said:
            progress(text)
            said = text
        time.sleep(POLL_SECONDS)
    return status


def _collect(remote: Remote, status: dict[str, Any], out: Path, progress: Progress) -> Place:
    last = status["last"]
    if last.get("outcome") != "sealed":
        raise RecordingError(f"the recording failed, SGLang did not: {last.get('why', 'nothing is known of it')}")
    place = str(last["out"])
    if is_url(place):
        return place
    progress(f"fetching {place}")
    remote.fetch(Path(place).name, out)
    return out
