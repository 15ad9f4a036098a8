"""What an armed server says of its recorder, as far as it can be: anything else is refused, whoever said it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_trace_serving.exchange import quoted

STATES = ("starting", "ready", "recording")
#: letters of a reason that a server takes (`bodies.FinishBody`)
STOPPED_LENGTH = 500
#: says whose recording it is; the server gives it to whoever starts one
TOKEN_HEADER = "X-Eagle-Trace-Token"
#: what a folder of a trace may be called: it becomes part of an address
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
#: a place that is not a folder of the server, but in a store that others reach too; users may copy it into a shell
_URL = re.compile(r"(?:s3a?|gc?s|abfss?|az|hf)://[A-Za-z0-9._~/%=@:+,-]{1,1000}", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}", re.ASCII)
_HOST = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_PATH_LENGTH = 4096
_DETAIL_LENGTH = 20_000
#: files of a trace of a terabyte, and more
MOST_FILES = 100_000


class NonsenseError(ValueError):
    """What no recorder says."""


@dataclass(frozen=True)
class Ended:
    """How the last recording ended.

    Attributes:
        outcome: ``sealed``, ``failed``, or nothing.
        why: it failed.
        detail: where in the code, of a bug: for whoever runs the server.
        stopped: why it ended before its requests did.
        prompts, rows: recorded.
        bytes, files: what the trace consists of.
    """

    outcome: str = ""
    why: str = ""
    detail: str = field(default="", repr=False)
    stopped: str = ""
    prompts: int = 0
    rows: int = 0
    bytes: int = 0
    files: int = 0


@dataclass(frozen=True)
class Told:
    """The answer of ``GET /eagle_trace`` and of the routes that start and finish.

    Attributes:
        state: one of `STATES`.
        place: of the recording that goes on or just began; printable, and its last part is a `NAME`.
        requests, ended: taken and ended so far.
        last: how the last recording ended.
        server: vocabulary and context length of the target, as `prompts.check_tokens` reads them.
        token: of a recording that just began.
        host: name of the server's program, where it is told.
    """

    state: str
    place: str | None = None
    requests: int = 0
    ended: int = 0
    last: Ended = field(default_factory=Ended)
    server: Mapping[str, int | None] = field(default_factory=dict)
    token: str | None = field(default=None, repr=False)
    host: str | None = None

    @property
    def name(self) -> str:
        """Name of the trace at `place`."""
        return _name(self.place or "")


def understood(answer: Any) -> Told:
    """What the JSON `answer` says.

    Raises:
        NonsenseError: it is not what a recorder says; the message is the reason in a few words.
    """
    if not isinstance(answer, dict):
        raise NonsenseError("not an object")
    if answer.get("state") not in STATES:
        raise NonsenseError("no state")
    last, server = _object(answer, "last"), _object(answer, "server")
    if (_count(last, "files") or 0) > MOST_FILES:
        raise NonsenseError("more files than a trace has")
    if last.get("outcome", "") not in ("", "sealed", "failed"):
        raise NonsenseError("no outcome")
    return Told(
        answer["state"],
        _place(answer.get("out")),
        _count(answer, "requests") or 0,
        _count(answer, "ended") or 0,
        Ended(
            last.get("outcome", ""),
            _words(last, "why"),
            _text(last, "detail")[:_DETAIL_LENGTH],
            _words(last, "stopped"),
            *(_count(last, name) or 0 for name in ("requests", "rows", "bytes", "files")),
        ),
        {
            "vocab_size": _count(server, "vocab_size"),
            "max_position_embeddings": _count(server, "context_length"),
        },
        _token(answer.get("token")),
        _host(answer.get("host")),
    )


def _object(answer: dict[str, Any], name: str) -> dict[str, Any]:
    value = answer.get(name) or {}
    if not isinstance(value, dict):
        raise NonsenseError(f"{name} is not an object")
    return value


def _count(answer: dict[str, Any], name: str) -> int | None:
    value = answer.get(name)
    if value is not None and not (type(value) is int and 0 <= value < 1 << 60):
        raise NonsenseError(f"{name} is not a number")
    return value


def _words(answer: dict[str, Any], name: str) -> str:
    return quoted(_text(answer, name))


def _text(answer: dict[str, Any], name: str) -> str:
    value = answer.get(name) or ""
    if not isinstance(value, str):
        raise NonsenseError(f"{name} is not a text")
    return value


def _host(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and _HOST.fullmatch(value)):
        raise NonsenseError("no name of a server")
    return value


def _place(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _PATH_LENGTH or not value.isprintable():
        raise NonsenseError("no place of a trace")
    if "://" in value and not _URL.fullmatch(value):
        raise NonsenseError("a place of the trace that is neither a folder nor in an object store")
    if not NAME.fullmatch(_name(value)):
        raise NonsenseError("no place of a trace")
    return value


def _name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2]


def _token(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and _TOKEN.fullmatch(value)):
        raise NonsenseError("no token")
    return value
