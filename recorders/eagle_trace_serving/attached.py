"""Recording in a server that its user started: armed by `EAGLE_TRACE_OUT`, in the server's main process.

The variables (`environment`) say what to record once the server is ready; after that, its HTTP routes (see `routes`)
and, in a process that has the engine to itself, `control()` start and end recordings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace.patience import MAX_WAIT, parse_wait
from eagle_trace.recording.hosts import Host
from eagle_trace.recording.wanted import parse_wanted
from eagle_trace.selection import parse_bytes
from eagle_trace_serving.admission import DEFAULT_REQUESTS, Admission
from eagle_trace_serving.control import Control, next_place
from eagle_trace_serving.environment import OUT, OWN, PREFIX, RECORD_OTHERS
from eagle_trace_serving.orders import Order

#: bytes of one recording that is started over HTTP, unless `EAGLE_TRACE_MAX_BYTES` says
CEILING = 4 * 10**9
#: how long the first request of an engine waits for the recorder
READY_SECONDS = 5.0

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]

logger = logging.getLogger(__name__)
_armed: Armed | None = None


def control() -> Control | None:
    """The control of the server that this process owns; None if it was not armed."""
    return None if _armed is None else _armed.control


class Armed:
    """What a server's plugin makes in its main process, before it starts the processes that run the draft.

    Args:
        host: the server's program.

    Attributes:
        control: starts and ends recordings.
    """

    def __init__(self, host: Host) -> None:
        try:
            order = order_of(os.environ)
        except EagleTraceError as error:
            # it can still be told over HTTP what to record
            logger.error("eagle-trace records nothing by itself: %s", error)  # noqa: TRY400 (a sentence, not a bug)
            order = None
        self._waiting = [] if order is None else [order]
        self.control = Control(host, _max_wait(os.environ))
        os.environ.update(self.control.environment)

    def add_routes(self, app: Any, api_keys: Sequence[str | None], admin_api_key: str | None, guard: Guard) -> None:
        """Hang the routes into the server's `app`.

        Args:
            app: a FastAPI application.
            api_keys, admin_api_key: what guards the server; None for no such key.
            guard: makes an endpoint one that the server's own middleware asks the admin key for, if it has one.
        """
        from eagle_trace_serving.access import Keys
        from eagle_trace_serving.routes import Routes, add_routes

        keys = Keys(tuple(key for key in api_keys if key), admin_api_key, opted_in(os.environ))
        own = bool(os.environ.get(OWN)) and bool(keys.api_keys or admin_api_key)
        routes = Routes(self.control, os.environ[OUT], keys, ceiling_of(os.environ), own=own)
        add_routes(app, routes, guard)

    def ready(self, *_args: Any, **_kwargs: Any) -> None:
        """Whatever request comes from now on is somebody's: begin what the variables ask for."""
        if self._waiting:
            self.start(self._waiting.pop())

    def start(self, order: Order) -> None:
        """Begin to record; what stands in the way is logged, since the server must serve all the same.

        Whoever calls this has requests of its own to answer: it waits `READY_SECONDS` for the recorder to be in place.
        """

        def begin() -> None:
            try:
                self.control.start(replace(order, out=next_place(order.out)))
            except EagleTraceError as error:
                logger.error("eagle-trace records nothing: %s", error)  # noqa: TRY400 (a sentence, not a bug)

        thread = threading.Thread(target=begin, name="eagle-trace-start", daemon=True)
        thread.start()
        thread.join(READY_SECONDS)

    def ending(self, *_args: Any, **_kwargs: Any) -> None:
        """The server ends: seal what there is."""
        self.control.close()


def arm(host: Host) -> Armed:
    """Arm the server that this process owns; see `Armed`."""
    global _armed
    _armed = Armed(host)
    return _armed


def when_serving(is_server: Callable[[Any], bool], act: Callable[[Any], None]) -> None:
    """Call `act(app)` for the FastAPI application that is the server's, before it answers anything.

    Where a server makes its application moves from release to release. What the first thing is that is asked of one
    does not.
    """
    from fastapi import FastAPI

    build = FastAPI.build_middleware_stack

    def built(self: Any) -> Any:
        if is_server(self):
            FastAPI.build_middleware_stack = build
            act(self)
        return build(self)

    FastAPI.build_middleware_stack = built


def order_of(environment: Mapping[str, str]) -> Order | None:
    """What the `variables` ask for; ``EAGLE_TRACE_REQUESTS=0`` to wait to be told.

    Returns:
        The recording to begin with, or None to wait.

    Raises:
        UsageError: a variable makes no sense.
    """
    given = {name.removeprefix(PREFIX): value for name, value in environment.items() if name.startswith(PREFIX)}
    requests = _number(given, "REQUESTS", int, DEFAULT_REQUESTS)
    kept = parse_wanted({name.lower(): text for name, text in given.items()}, PREFIX, ("sites", "roots", "steps"))
    order = Order(
        out=given["OUT"],
        admission=Admission(None, requests or None, given.get("MATCH", ""), _number(given, "SAMPLE", float, 1.0)),
        keep_empty=False,
        **kept,
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


def _number(given: Mapping[str, str], name: str, kind: Any, default: Any) -> Any:
    try:
        return kind(given[name]) if name in given else default
    except ValueError as error:
        raise UsageError(f"{PREFIX}{name} must be a number, not {given[name]!r}") from error
