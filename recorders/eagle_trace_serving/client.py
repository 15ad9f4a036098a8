"""`record --mode serve --attach URL`: ask a server that somebody else started, and fetch what it recorded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from eagle_trace.errors import HostError, PromptsError, RecordingError
from eagle_trace.prompts import check_tokens
from eagle_trace.recording.hosts import find_host
from eagle_trace_serving.answers import Ended, Told
from eagle_trace_serving.host import Ask, ServingHost
from eagle_trace_serving.remote import Remote
from eagle_trace_serving.requests import Answers, Request, counts_of

POLL_SECONDS = 0.5
#: how often a server is told that somebody still waits for the answers, and asked whether it still records
RENEW_SECONDS = 5.0
#: how long after its time limit a server may still be recording
GRACE_SECONDS = 60.0

Progress = Callable[[str], None]
Said = TypeVar("Said")


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
    host: ServingHost | None,
    request: Request | None,
    options: dict[str, Any],
    progress: Progress = lambda _: None,
) -> tuple[Remote, Recorded]:
    """Record in a running server and fetch the trace, unless it has no row or the server keeps it elsewhere.

    Args:
        remote: the server.
        out: empty folder for the trace, nobody else's.
        host: the server's program; None for what the server says.
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
            settings, stopped = _answered(remote, host or _host_of(remote, told), request, progress)
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
        raise RecordingError(f"the recording failed, the server did not: {ended.why or 'nothing is known of it'}")
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


def _host_of(remote: Remote, told: Told) -> ServingHost:
    if told.host is None:
        raise HostError(f"{remote.url} does not say what program it is: name it with --host")
    host: ServingHost = find_host("server", told.host, program=False)
    return host


def _answered(
    remote: Remote, host: ServingHost, request: Request, progress: Progress
) -> tuple[dict[str, Any], str | None]:
    """Send all prompts, so many at a time; the server's counts, and what kept it from answering all of them."""
    questions = [
        Question((rid,), host.ask(prompt, rid, request))
        for rid, prompt in zip(request.rids, request.prompts, strict=True)
    ]
    answers, unanswered = ask_all(remote, host, questions, request.batch_size, progress)
    if len(unanswered) == len(request.prompts):
        raise type(unanswered[0])(f"no prompt was answered: {unanswered[0]}")
    why = f"{len(unanswered)} of {len(request.prompts)} prompts were not answered" if unanswered else None
    return {"server_counts": counts_of(answers)}, why and f"{why}: {unanswered[0]}"


@dataclass(frozen=True)
class Question:
    """What is sent in one HTTP request: the request ids of its prompts, and the request."""

    rids: tuple[str, ...]
    ask: Ask


def ask_all(
    remote: Remote,
    host: ServingHost,
    questions: Sequence[Question],
    at_once: int,
    progress: Progress,
    *,
    renew_seconds: float | None = RENEW_SECONDS,
) -> tuple[Answers, list[HostError | PromptsError]]:
    """Ask, so much at a time.

    Args:
        remote: the server.
        host: its program.
        questions: what to ask.
        at_once: how many questions wait for their answers at one time.
        progress: told how many prompts were answered.
        renew_seconds: how often to ask whether the server still records; if not, nothing more is asked. None for never.

    Returns:
        The answers, and for each question that had none the reason.
    """
    answers: Answers = {}
    started = renewed = time.monotonic()
    waiting = list(questions)
    prompts = sum(len(question.rids) for question in questions)
    running: dict[Future[Any], Question] = {}
    unanswered: list[HostError | PromptsError] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                question = waiting.pop(0)
                running[begun(partial(remote.ask, question.ask))] = question
            done, _ = wait(running, renew_seconds, return_when=FIRST_COMPLETED)
            if renew_seconds is not None and time.monotonic() - renewed >= renew_seconds:
                renewed = time.monotonic()
                with contextlib.suppress(HostError, RecordingError):
                    # also tells the server that somebody still waits
                    if remote.status().state != "recording":
                        waiting.clear()  # a limit was reached: what is still asked would be recorded nowhere
            for future in done:
                question = running.pop(future)
                try:
                    said = _understood(remote, host, question, future.result())
                except (HostError, PromptsError) as error:
                    # a request that never ends or is refused, a server that is gone: keep the others' rows
                    unanswered.append(error)
                    for rid in question.rids:
                        remote.abort(host.abort(rid))
                    continue
                answers |= said
                seconds = time.monotonic() - started
                progress(f"{len(answers)} of {prompts} prompts answered, {seconds:.0f} s")
    finally:
        # after an interruption: requests that nobody waits for any more
        for rid in (rid for question in running.values() for rid in question.rids):
            if not remote.abort(host.abort(rid)):
                break
    return answers, unanswered


def _understood(remote: Remote, host: ServingHost, question: Question, reply: Any) -> Answers:
    try:
        return dict(zip(question.rids, host.answers(reply, question.rids), strict=True))
    except ValueError as error:
        raise HostError(f"{remote.url} answered {question.ask.path} with what no {host.title} says: {error}") from None


def begun(ask: Callable[[], Said]) -> Future[Said]:
    """What `ask` will return, from a thread that keeps nobody from ending the program: a server may never answer."""
    future: Future[Said] = Future()

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
