"""Recording in a server that its user started: armed by `EAGLE_TRACE_OUT`, in SGLang's main process.

The variables below say what to record once the server is ready; after that, its HTTP routes (see `routes`) and, in a
process with an `Engine`, `control()` start and end recordings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace.patience import MAX_WAIT, parse_wait
from eagle_trace.selection import Selection, parse_bytes
from eagle_trace_serving.admission import DEFAULT_REQUESTS, Admission
from eagle_trace_serving.control import Control, next_place
from eagle_trace_serving.orders import Order
from eagle_trace_sglang.plugin import OUT, PREFIX, RECORD_OTHERS

#: what the variables may say beside OUT
ASKED = (
    "REQUESTS",
    "MATCH",
    "SAMPLE",
    "LEVEL",
    "MAX_BYTES",
    "SECONDS",
    "SITES",
    "ROOTS",
    "STEPS",
    "KEEP_CUDA_GRAPHS",
    "MAX_WAIT",
)
VARIABLES = (OUT, RECORD_OTHERS, *(PREFIX + name for name in ASKED))
#: bytes of one recording that is started over HTTP, unless `EAGLE_TRACE_MAX_BYTES` says
CEILING = 4 * 10**9
HTTP_SERVER = "sglang.srt.entrypoints.http_server"

#: how long the first request of an Engine waits for the recorder
READY_SECONDS = 5.0

logger = logging.getLogger(__name__)
_control: Control | None = None


def control() -> Control | None:
    """The control of the SGLang that this process owns; None if it was not armed."""
    return _control


def arm() -> None:
    """Make this process's `Control`, before SGLang starts its scheduler processes, and hook what says it is ready."""
    global _control
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        order = order_of(os.environ)
    except EagleTraceError as error:
        # it can still be told over HTTP what to record
        logger.error("eagle-trace records nothing by itself: %s", error)  # noqa: TRY400 (a sentence, not a bug)
        order = None
    _control = Control(_max_wait(os.environ))
    os.environ.update(_control.environment)

    def serving(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        from sglang.srt.entrypoints.http_server import app

        from eagle_trace_serving.access import keys_of
        from eagle_trace_serving.routes import add_routes

        keys = keys_of(server_args, record_others=opted_in(os.environ))
        add_routes(app, _require(), os.environ[OUT], keys, ceiling_of(os.environ))

    waiting = [] if order is None else [order]

    def ready(*_args: Any, **_kwargs: Any) -> None:
        if waiting:
            start(waiting.pop())

    def ending(*_args: Any, **_kwargs: Any) -> None:
        _require().close()

    HookRegistry.register(f"{HTTP_SERVER}._setup_and_run_http_server", serving, HookType.BEFORE)
    # the server's own warm-up requests are over: whatever comes now is somebody's
    HookRegistry.register(f"{HTTP_SERVER}._wait_and_warmup", ready, HookType.AFTER)
    # an Engine loads its plugins from inside its constructor, which is too late to be told of its end
    for name in ("generate", "async_generate"):
        HookRegistry.register(f"sglang.srt.entrypoints.engine.Engine.{name}", ready, HookType.BEFORE)
    HookRegistry.register("sglang.srt.utils.common.kill_process_tree", ending, HookType.BEFORE)


def _require() -> Control:
    if _control is None:
        raise RuntimeError("this process was not armed")
    return _control


def start(order: Order) -> None:
    """Begin to record; what stands in the way is logged, since the server must serve all the same.

    Whoever calls this has requests of its own to answer: it waits `READY_SECONDS` for the recorder to be in place.
    """

    def begin() -> None:
        try:
            _require().start(replace(order, out=next_place(order.out)))
        except EagleTraceError as error:
            logger.error("eagle-trace records nothing: %s", error)  # noqa: TRY400 (a sentence, not a bug)

    thread = threading.Thread(target=begin, name="eagle-trace-start", daemon=True)
    thread.start()
    thread.join(READY_SECONDS)


def order_of(environment: Mapping[str, str]) -> Order | None:
    """What the `VARIABLES` ask for; ``EAGLE_TRACE_REQUESTS=0`` to wait to be told.

    Returns:
        The recording to begin with, or None to wait.

    Raises:
        UsageError: a variable makes no sense.
    """
    given = {name.removeprefix(PREFIX): value for name, value in environment.items() if name.startswith(PREFIX)}
    requests = _number(given, "REQUESTS", int, DEFAULT_REQUESTS)
    budget = given.get("MAX_BYTES")
    order = Order(
        out=given["OUT"],
        admission=Admission(None, requests or None, given.get("MATCH", ""), _number(given, "SAMPLE", float, 1.0)),
        level=given.get("LEVEL", "values"),
        max_bytes=parse_bytes(budget) if budget else None,
        selection=Selection.parse(sites=given.get("SITES"), roots=given.get("ROOTS"), steps=given.get("STEPS")),
        keep_cuda_graphs=_is_on(given.get("KEEP_CUDA_GRAPHS", "")),
        seconds=_number(given, "SECONDS", float, 0.0) or None,
        max_wait=parse_wait(given["MAX_WAIT"], f"{PREFIX}MAX_WAIT") if "MAX_WAIT" in given else None,
        keep_empty=False,
    )
    return order if requests else None


def _max_wait(environment: Mapping[str, str]) -> float:
    """How long the server may wait for the disk in each recording; a value that makes no sense was said already."""
    with contextlib.suppress(UsageError):
        return parse_wait(environment.get(f"{PREFIX}MAX_WAIT", ""), f"{PREFIX}MAX_WAIT")
    return MAX_WAIT


def ceiling_of(environment: Mapping[str, str]) -> int:
    """Bytes that are kept of one recording that is started over HTTP."""
    try:
        return parse_bytes(environment.get(PREFIX + "MAX_BYTES") or str(CEILING))
    except UsageError:  # said when the server was armed
        return CEILING


def opted_in(environment: Mapping[str, str]) -> bool:
    """Whether everybody may record everybody, where there is no key: only if it was said in so many words."""
    return environment.get(RECORD_OTHERS, "").strip().lower() in ("1", "true", "yes", "on")


def _is_on(value: str) -> bool:
    return value not in ("", "0")


def _number(given: Mapping[str, str], name: str, kind: Any, default: Any) -> Any:
    try:
        return kind(given[name]) if name in given else default
    except ValueError as error:
        raise UsageError(f"{PREFIX}{name} must be a number, not {given[name]!r}") from error
