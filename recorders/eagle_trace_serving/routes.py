"""HTTP routes that an armed server has beside its own, under ``/eagle_trace``.

- ``GET /eagle_trace``: what is going on; renews the lease of whoever started it.
- ``POST /eagle_trace/start``: begin to record; the body names what (`bodies.StartBody`), ``{}`` for all requests to
  come. The answer has a ``token``, which the other routes take in the header ``X-Eagle-Trace-Token``.
- ``POST /eagle_trace/finish``: end it and seal; ``{"settings": ..., "stopped": ...}``.
- ``GET /eagle_trace/traces/NAME``: a finished trace as a tar stream; ``DELETE`` removes it from the server.

What is not done is answered with ``{"error": one sentence}`` and a status: 401 or 403 for who may not (`access`), 413
and 422 for a body that does not make sense (`bodies`), 404 for no such trace, 429 for too much at once, 409
for all else.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from eagle_trace.contents import trace_files
from eagle_trace.errors import EagleTraceError, RecordingError, TraceNotFoundError, UsageError
from eagle_trace.manifest import rank_of_seal
from eagle_trace.patience import FOLDER_SECONDS, within
from eagle_trace.store import as_place, is_url, join, open_store, reason
from eagle_trace_serving.access import DeniedError, Keys, Pace, Tokens
from eagle_trace_serving.answers import NAME
from eagle_trace_serving.archive import pack
from eagle_trace_serving.bodies import (
    MOST_BYTES,
    MOST_OWN,
    MOST_VALUES,
    BodyError,
    FinishBody,
    OwnFinishBody,
    OwnStartBody,
    Reader,
    StartBody,
    parse_body,
)
from eagle_trace_serving.control import Control, next_place
from eagle_trace_serving.environment import RECORD_OTHERS

NO_TRACE = "this server has no such trace, or not for somebody without its token or the server's key"
#: bodies that are read at once; starts and ends that are waited for, of them those of clients without a key; downloads
MOST_READ, MOST_AT_ONCE, MOST_OF_STRANGERS, MOST_SENT = 32, 16, 8, 2
#: threads for all else
WORKERS = 4

logger = logging.getLogger(__name__)


class _Download(StreamingResponse):
    """A stream of blocks, and what to do when it has ended, however it did."""

    def __init__(self, blocks: AsyncIterator[bytes], length: int, ended: Callable[[], None]) -> None:
        super().__init__(blocks, media_type="application/x-tar", headers={"Content-Length": str(length)})
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


class Routes:
    """What the routes do. Nothing here runs in the server's event loop for longer than it takes to look something up.

    Args:
        control: starts and ends recordings.
        folder: traces go below it.
        keys: who may do everything.
        ceiling: bytes of one recording.
        own: `record` started this server, and whoever has its key may also do what only `record` may (`bodies`).
    """

    def __init__(self, control: Control, folder: str, keys: Keys, ceiling: int, *, own: bool = False) -> None:
        self._control = control
        self._folder = folder
        self._keys = keys
        self._ceiling = ceiling
        self._own = own
        self._tokens = Tokens()
        self._pace = Pace()
        self._reader = Reader(MOST_READ)
        self._at_once = 0
        self._sent: Counter[str] = Counter()

    async def status(self, request: Request) -> JSONResponse:
        """What is going on; to somebody without key and token, the state alone."""
        everything = self._keys.may_do_all(request.headers)
        mine = self._tokens.name(request.headers)
        if mine is not None and self._is_going_on(mine):
            self._control.renew()
        if mine is None and not everything:
            return JSONResponse({"state": self._control.state})
        return JSONResponse(await self._work(lambda: self._told(mine)))

    async def start(self, request: Request) -> JSONResponse:
        """Begin to record."""
        stranger = not self._keys.may_do_all(request.headers)

        def begin(body: StartBody) -> dict[str, Any]:
            if stranger and not body.is_own:
                raise DeniedError(
                    "this server has no key, so it records for you only requests that you name, under ids "
                    "eagle-trace-<32 random hex digits>-<number>: to record others', start it with --api-key or "
                    f"--admin-api-key, or, where everybody who reaches it may see everything, with {RECORD_OTHERS}=1",
                    403,
                )
            order = body.order(next_place(self._folder), self._ceiling, stranger=stranger)
            if stranger:
                if self._control.recording_into is not None:
                    raise UsageError("another recording is going on: ask again when the state is ready")
                self._pace.take()
                within(FOLDER_SECONDS, lambda: self._tokens.make_room(self._is_there), "the folder of the traces")
            self._control.start(order)
            token = self._tokens.issue(_name(order.out), stranger=stranger)
            return self._control.status() | {"out": order.out, "token": token}

        kind = OwnStartBody if self._own and not stranger else StartBody
        return JSONResponse(await self._with_body(request, kind, begin, stranger=stranger))

    async def finish(self, request: Request) -> JSONResponse:
        """End the recording that is going on, if it is that of whoever asks, and say how it went."""
        everything = self._keys.may_do_all(request.headers)
        mine = self._tokens.name(request.headers)
        if mine is None and not everything:
            raise DeniedError("only whoever started a recording may end it, by its token", 403)

        def end(body: FinishBody) -> dict[str, Any]:
            going_on = self._control.recording_into
            if going_on is not None and mine in (None, _name(going_on)):
                self._control.finish(body.settings.said(), body.stopped, only=going_on)
            return self._told(mine)

        kind = OwnFinishBody if self._own and everything else FinishBody
        return JSONResponse(await self._with_body(request, kind, end, stranger=not everything))

    async def download(self, request: Request, name: str) -> StreamingResponse:
        """A trace as a tar stream of known length."""
        path = await self._trace(request, name)
        try:
            length, blocks = await self._on_disk(lambda: pack(path), name)
        except OSError as error:
            raise TraceNotFoundError(f"{name} cannot be read: {reason(error)}") from error
        if self._sent[name] >= MOST_SENT:
            raise BodyError(f"{name} is being sent {MOST_SENT} times already: ask again", 429)
        self._sent[name] += 1

        def ended() -> None:
            self._sent -= Counter([name])
            with contextlib.suppress(ValueError):  # a read that hangs still holds it
                blocks.close()

        return _Download(self._blocks(blocks, name), length, ended)

    async def remove(self, request: Request, name: str) -> JSONResponse:
        """Remove a trace from the server."""
        path = await self._trace(request, name)
        try:
            await self._on_disk(lambda: shutil.rmtree(path), name)
        except OSError as error:
            raise RecordingError(f"{name} cannot be removed: {reason(error)}") from error
        return JSONResponse({"state": self._control.state})

    def _is_going_on(self, name: str) -> bool:
        place = self._control.recording_into
        return place is not None and _name(place) == name

    def _told(self, mine: str | None) -> dict[str, Any]:
        """The status, to whoever recorded `mine`: what others record meanwhile is none of theirs."""
        status = self._control.status()
        if mine is None or self._is_going_on(mine):
            return status
        ended = [one for out, one in self._control.outcomes.items() if _name(out) == mine]
        return {"state": "ready", "out": None, "last": ended[-1] if ended else {}, "server": status["server"]}

    async def _blocks(self, blocks: Iterator[bytes], name: str) -> AsyncIterator[bytes]:
        while (block := await self._on_disk(lambda: next(blocks, None), name)) is not None:
            yield block

    async def _trace(self, request: Request, name: str) -> Path:
        """The finished trace `name`, if whoever asks may have it; who may not is not told that it is there."""
        if not self._keys.may_do_all(request.headers) and self._tokens.name(request.headers) != name:
            raise TraceNotFoundError(NO_TRACE)
        path: Path = await self._on_disk(lambda: self._find(name), name)
        return path

    def _find(self, name: str) -> Path:
        """The trace `name` right below the folder, which must be on this machine's own disks.

        Whoever reaches the server may name it, so nothing but a folder that a recorder made will do.
        """
        if is_url(self._folder):
            raise UsageError(f"traces of this server lie at {self._folder}: open them there")
        path = Path(self._folder) / name
        try:
            made = (
                NAME.fullmatch(name) is not None and not path.is_symlink() and any(map(rank_of_seal, trace_files(path)))
            )
        except OSError:
            made = False
        if not made:
            raise TraceNotFoundError(NO_TRACE)
        going_on = self._control.recording_into
        if going_on is not None and Path(going_on) == path:
            raise UsageError(f"{name} is being recorded: end it first with POST /eagle_trace/finish")
        return path

    def _is_there(self, name: str) -> bool:
        try:
            return open_store(join(as_place(self._folder), name)).is_folder()
        except OSError:
            return True

    async def _with_body(
        self, request: Request, kind: Any, act: Callable[[Any], dict[str, Any]], *, stranger: bool
    ) -> dict[str, Any]:
        limits = (MOST_OWN, MOST_OWN) if self._own and not stranger else (MOST_BYTES, MOST_VALUES)
        data = await self._reader.read(request, limits[0])
        most = MOST_OF_STRANGERS if stranger else MOST_AT_ONCE
        if self._at_once >= most:
            raise BodyError(f"{most} requests are being worked on already: ask again", 429)
        self._at_once += 1
        try:
            # a recording takes its time to begin and to end: whoever only looks something up does not wait for it
            return await self._work(lambda: act(parse_body(data, kind, limits[1])), _waiters())
        finally:
            self._at_once -= 1

    async def _on_disk(self, act: Callable[[], Any], name: str) -> Any:
        """Do what touches the trace `name`; a disk that hangs is left behind, and the other routes go on."""
        return await self._work(lambda: within(FOLDER_SECONDS, act, name))

    async def _work(self, act: Callable[[], Any], limiter: anyio.CapacityLimiter | None = None) -> Any:
        """Do what may wait in a thread of our own few: the server's must not run out of them."""
        return await anyio.to_thread.run_sync(act, limiter=limiter or _workers())


@cache
def _waiters() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(MOST_AT_ONCE)


@cache
def _workers() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(WORKERS)


def add_routes(app: FastAPI, routes: Routes, guard: Callable[[Any], Any]) -> None:
    """Hang `routes` into a server's `app`, each endpoint passed through `guard`, before middleware asks for keys."""
    for method, path, act in (
        ("GET", "", routes.status),
        ("POST", "/start", routes.start),
        ("POST", "/finish", routes.finish),
        ("GET", "/traces/{name}", routes.download),
        ("DELETE", "/traces/{name}", routes.remove),
    ):
        app.add_api_route(
            f"/eagle_trace{path}",
            guard(_answering(act)),
            methods=[method],
            response_model=None,
            include_in_schema=False,
        )


def _answering(act: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """An endpoint that answers what is refused with one sentence; `act` takes the request and the route's names."""

    async def answer(request: Request) -> Any:
        try:
            return await act(request, **request.path_params)
        except EagleTraceError as error:
            status = 404 if isinstance(error, TraceNotFoundError) else getattr(error, "status", 409)
            sentence, *detail = str(error).splitlines() or [""]
            if detail:  # where in the code a bug is: for whoever runs the server, and not for whoever asks it
                logger.error("eagle-trace: %s", error)  # noqa: TRY400 (the error has its own)
            return JSONResponse({"error": sentence}, status_code=status)

    return answer


def _name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2]
