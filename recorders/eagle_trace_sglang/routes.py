"""HTTP routes that an armed SGLang server has beside its own, under ``/eagle_trace``.

- ``GET /eagle_trace``: what is going on (`Control.status`).
- ``POST /eagle_trace/start``: begin to record; the body names what (`StartBody`), ``{}`` for the next requests.
- ``POST /eagle_trace/finish``: end it and seal; ``{"settings": ..., "stopped": ...}``.
- ``GET /eagle_trace/traces/NAME``: a finished trace as a tar stream; ``DELETE`` removes it from the server.

What cannot be done is answered with status 409 and ``{"error": one sentence}``. SGLang's own API key guards these
routes as it does all others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from eagle_trace.errors import EagleTraceError, TraceNotFoundError, UsageError
from eagle_trace.manifest import rank_of_seal
from eagle_trace.selection import Selection, parse_bytes
from eagle_trace.store import is_url
from eagle_trace_sglang.admission import Admission
from eagle_trace_sglang.control import Control, next_place
from eagle_trace_sglang.orders import Order

BLOCK_BYTES = 1 << 20
#: a client that names its requests asks for the status far more often than this
LEASE_SECONDS = 60.0


class StartBody(BaseModel):
    """What to record; names and meaning as on the command line.

    `named` takes exactly these requests: ``{request id: [prompt number, prompt key]}``.
    """

    named: dict[str, tuple[int, str]] | None = None
    requests: int | None = None
    match: str = ""
    sample: float = 1.0
    level: str = "values"
    max_bytes: str | None = None
    sites: str | None = None
    roots: str | None = None
    steps: str | None = None
    keep_cuda_graphs: bool = False
    seconds: float | None = None
    settings: dict[str, Any] = {}
    argv: list[str] = []

    def order(self, folder: str) -> Order:
        """The recording asked for, to be written below `folder`."""
        return Order(
            out=next_place(folder),
            admission=Admission(self.named, self.requests, self.match, self.sample),
            level=self.level,
            max_bytes=parse_bytes(self.max_bytes) if self.max_bytes else None,
            selection=Selection.parse(sites=self.sites, roots=self.roots, steps=self.steps),
            # a client that names its requests also says when it is done
            alone=self.named is None,
            lease=LEASE_SECONDS if self.named is not None else None,
            keep_cuda_graphs=self.keep_cuda_graphs,
            seconds=self.seconds,
            settings=self.settings,
            argv=tuple(self.argv),
        )


class FinishBody(BaseModel):
    """What to add to the manifest, and why the recording ends before its requests did."""

    settings: dict[str, Any] = {}
    stopped: str | None = "told to stop"


def add_routes(app: FastAPI, control: Control, folder: str) -> None:
    """Hang the routes into SGLang's `app`; traces go below `folder`."""
    router = APIRouter(prefix="/eagle_trace")

    @router.get("")
    def status() -> dict[str, Any]:
        control.renew()
        return control.status()

    @router.post("/start")
    def start(body: StartBody) -> dict[str, Any]:
        control.start(body.order(folder))
        return control.status()

    @router.post("/finish")
    def finish(body: FinishBody) -> dict[str, Any]:
        control.finish(body.settings, body.stopped)
        return control.status()

    @router.get("/traces/{name}")
    def download(name: str) -> StreamingResponse:
        return StreamingResponse(_tar(_trace(folder, name)), media_type="application/x-tar")

    @router.delete("/traces/{name}")
    def remove(name: str) -> dict[str, Any]:
        path, status = _trace(folder, name), control.status()
        if status["out"] is not None and Path(status["out"]) == path:
            raise UsageError(f"{name} is being recorded: end it first with POST /eagle_trace/finish")
        shutil.rmtree(path)
        return status

    app.include_router(router)
    app.add_exception_handler(EagleTraceError, _refuse)


def _refuse(_request: Any, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=409)


def _trace(folder: str, name: str) -> Path:
    """The trace `name` right below `folder`, which must be on this machine's own disks.

    Whoever reaches the server may name it, so nothing but a folder that a recorder made will do.
    """
    if is_url(folder):
        raise UsageError(f"traces of this server lie at {folder}: open them there")
    path = Path(folder) / name
    made = path.is_dir() and not path.is_symlink() and any(rank_of_seal(entry.name) for entry in path.iterdir())
    if name in ("", ".", "..") or Path(name).name != name or not made:
        raise TraceNotFoundError(f"this server has no trace {name!r}")
    return path


def _tar(path: Path) -> Iterator[bytes]:
    """The files of a folder as a tar stream; a pipe keeps what is not sent yet small."""
    reading, writing = os.pipe()

    def pack() -> None:
        # a client that hangs up breaks the pipe; it has what it has
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(writing, "wb") as stream,
            tarfile.open(mode="w|", fileobj=stream) as archive,
        ):
            archive.add(path, arcname=".")

    threading.Thread(target=pack, name="eagle-trace-tar", daemon=True).start()
    with os.fdopen(reading, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
