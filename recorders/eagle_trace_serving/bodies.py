"""What a client may send to the routes, and how much of it: everything is checked before anything starts.

Bounds are far above what anybody needs, and low enough that a body costs the server milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from starlette.requests import ClientDisconnect

from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace.manifest import without_secrets
from eagle_trace.recording.wanted import KINDS, Kind, read
from eagle_trace.selection import Selection
from eagle_trace.writer import DP_STRIDE
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.answers import STOPPED_LENGTH
from eagle_trace_serving.exchange import parse_json, quoted
from eagle_trace_serving.orders import Order

MOST_BYTES = 2 << 20
#: values in a body: ten counts for each of `MOST_REQUESTS`, and more; reading them takes a few hundredths of a second
MOST_VALUES = 200_000
#: letters of what a client says beside that: it is written again whenever a manifest is
MOST_SAID = 64 << 10
MOST_REQUESTS = 10_000
#: bytes of a body, and values in it, from `record` to the server that it started itself
MOST_OWN = 1 << 30
#: how long a body may take to arrive
BODY_SECONDS = 10.0
#: a client that names its requests asks for the status far more often than this
LEASE_SECONDS = 60.0
LONGEST_SECONDS = 86_400.0
#: somebody without a key must make room for others
STRANGER_SECONDS = 3600.0
#: request ids that belong to whoever records: reserved, and not to be guessed
OWN_ID = re.compile(r"eagle-trace-[0-9a-f]{32}-\d{1,7}", re.ASCII)

Rid = Annotated[str, Field(min_length=1, max_length=256)]
# strict: true is no number, and "1" is none either
Number = Annotated[int, Field(ge=0, lt=DP_STRIDE, strict=True)]
Count = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
Key = Annotated[str, Field(max_length=1024)]
Chosen = Annotated[str, Field(max_length=20_000)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class BodyError(EagleTraceError):
    """A body that does not make sense.

    Attributes:
        status: of the answer.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


class Settings(BaseModel):
    """What a client may say of how it asked; any other name is kept apart, under ``client``.

    Facts of the server have names of their own in a manifest, and no client sets those.
    """

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Count | None = None
    batch_size: Count | None = None
    temperature: Annotated[Finite, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        if self.model_extra and len(json.dumps(self.model_extra)) > MOST_SAID:
            raise ValueError(f"more than {MOST_SAID} letters of what the recorder does not know")
        return self

    def said(self) -> dict[str, Any]:
        """As the manifest has it."""
        known = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        return known | ({"client": self.model_extra} if self.model_extra else {})


class LastSettings(Settings):
    """What is known at the end: the server's own counts for each request, too."""

    server_counts: (
        Annotated[
            dict[Rid, Annotated[dict[Annotated[str, Field(max_length=64)], Finite], Field(max_length=64)]],
            Field(max_length=MOST_REQUESTS),
        ]
        | None
    ) = None


class OwnLastSettings(LastSettings):
    """The same of any number of requests."""

    server_counts: dict[str, dict[str, float]] | None = None


#: what a client may send for an option of a kind; of the ``host``'s own affair nothing
SENT: dict[Kind, Any] = {
    "level": Literal["shapes", "stats", "sketch", "values"],
    "bytes": Annotated[str, Field(max_length=40)],
    "flag": Annotated[bool, Field(strict=True)],
    "seconds": Annotated[Finite, Field(gt=0, le=LONGEST_SECONDS)],
}
#: the options of a recording (`Wanted`), in a body
WantedBody: Any = create_model(
    "WantedBody",
    __config__=ConfigDict(extra="forbid"),
    **{name: (SENT[kind] | None, None) for name, kind in KINDS.items() if kind in SENT},
)


class StartBody(WantedBody):
    """What to record; names and meaning as on the command line.

    `named` takes exactly these requests: ``{request id: [prompt number, prompt key]}``.
    """

    named: Annotated[dict[Rid, tuple[Number, Key]], Field(min_length=1, max_length=MOST_REQUESTS)] | None = None
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS, strict=True)] = MOST_REQUESTS
    match: Annotated[str, Field(max_length=256)] = ""
    sample: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    sites: Chosen | None = None
    roots: Chosen | None = None
    steps: Chosen | None = None
    settings: Settings = Settings()
    argv: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=1000)] = Field(default_factory=list)

    @property
    def is_own(self) -> bool:
        """Whether it asks for nobody's requests but those that only the one who records can send."""
        return self.named is not None and all(map(OWN_ID.fullmatch, self.named))

    def order(self, out: str, ceiling: int, *, stranger: bool) -> Order:
        """The recording asked for.

        Args:
            out: place of the trace.
            ceiling: bytes that the server keeps of one recording.
            stranger: whoever asks has no key, so that the recording ends after `STRANGER_SECONDS`.

        Raises:
            UsageError: it does not make sense, or is more than the server keeps.
        """
        kept = {"max_bytes": ceiling, **self.kept}
        if kept["max_bytes"] > ceiling:
            raise UsageError(
                f"this server keeps at most {ceiling} bytes of one recording: ask for less, or have it started with a "
                "larger EAGLE_TRACE_MAX_BYTES"
            )
        if stranger:
            kept["seconds"] = min(kept.get("seconds", STRANGER_SECONDS), STRANGER_SECONDS)
        return Order(
            out=out,
            admission=self.admission,
            # a client that names its requests also says when it is done
            alone=self.named is None,
            lease=LEASE_SECONDS if self.named is not None else None,
            settings=self.settings.said(),
            argv=tuple(without_secrets(self.argv)),
            keep_empty=False,
            **kept,
        )

    @property
    def admission(self) -> Admission:
        """The requests to take."""
        return Admission(self.named, self.requests, self.match, self.sample)

    @property
    def kept(self) -> dict[str, Any]:
        """The fields of `Wanted` that it says."""
        said = {name: getattr(self, name) for name in WantedBody.model_fields}
        kept = {name: read(name, value) for name, value in said.items() if value not in (None, "")}
        return kept | {"selection": Selection.parse(sites=self.sites, roots=self.roots, steps=self.steps)}


class OwnStartBody(StartBody):
    """What `record` asks of a server that it started itself, and nobody else may ask of one: `out` is any place."""

    named: dict[Rid, tuple[Number, Key]]
    out: Annotated[str, Field(min_length=1)]
    changes: list[str] = Field(default_factory=list)
    started: dict[str, Any] = Field(default_factory=dict)
    argv: list[str] = Field(default_factory=list)

    def order(self, _out: str, _ceiling: int, *, stranger: bool) -> Order:  # noqa: ARG002 (it has the server's key)
        """The recording asked for; UsageError if it does not make sense."""
        return Order(
            out=self.out,
            admission=self.admission,
            alone=False,
            settings=self.settings.said() | self.started,
            changes=tuple(self.changes),
            argv=tuple(self.argv),
            **self.kept,
        )


class FinishBody(BaseModel):
    """What to add to the manifest, and why the recording ends before its requests did."""

    model_config = ConfigDict(extra="forbid")

    settings: LastSettings = LastSettings()
    stopped: Annotated[str, Field(max_length=STOPPED_LENGTH), AfterValidator(quoted)] | None = "told to stop"


class OwnFinishBody(FinishBody):
    """As `record` says it to a server that it started itself, of any number of requests."""

    settings: OwnLastSettings = OwnLastSettings()


Body = TypeVar("Body", bound=BaseModel)


class Reader:
    """Reads bodies, `most` at a time; one more ends the wait for the oldest, so that nobody keeps others out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waits: dict[int, asyncio.Timeout] = {}

    async def read(self, request: Request, limit: int = MOST_BYTES) -> bytes:
        """The body of a request, read no further than `limit` bytes.

        Raises:
            BodyError: it is too long, or does not arrive.
        """
        data = bytearray()
        if len(self._waits) >= self._most:
            self._waits.pop(next(iter(self._waits))).reschedule(0.0)
        try:
            async with asyncio.timeout(BODY_SECONDS) as wait:
                self._waits[id(wait)] = wait
                try:
                    async for part in request.stream():
                        data += part
                        if len(data) > limit:
                            raise BodyError(f"the body is longer than {limit} bytes, which is as much as is read", 413)
                finally:
                    self._waits.pop(id(wait), None)
        except TimeoutError:
            raise BodyError(
                f"the body did not arrive within {BODY_SECONDS:.0f} s, or before {self._most} others", 408
            ) from None
        except ClientDisconnect:
            raise BodyError("the body did not arrive", 408) from None
        return bytes(data)


def parse_body(data: bytes, kind: type[Body], most: int = MOST_VALUES) -> Body:
    """What a body of at most `most` values says. Takes a while for a long one: not for an event loop.

    Raises:
        BodyError: it is not what it must be; the message is one sentence.
    """
    try:
        given = parse_json(data, most) if data.strip() else {}
        if b"\\u" in data:
            json.dumps(given, ensure_ascii=False).encode()  # half a surrogate pair is no text, and could not be written
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"][:4]) or "the body"
        raise BodyError(f"the body does not make sense: {quoted(where, 120)}: {quoted(first['msg'], 160)}") from None
    except UnicodeEncodeError:
        raise BodyError("the body holds half a surrogate pair, which is no text") from None
    except ValueError as error:
        raise BodyError(f"the body is not JSON that is read here: {quoted(str(error), 120)}") from None
