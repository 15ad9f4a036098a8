"""Who may do what over HTTP: the server's own keys, and a token for whoever started a recording.

A server that has an admin key takes that one for these routes; one that has an API key alone takes that one, as a
server's own management routes do. Whoever has the key may do everything.

A server without a key knows nobody. There anybody may record requests under ids that nobody else can guess
(`bodies.OWN_ID`), and do with that recording what its token allows. What others ask, and what the server recorded by
itself, is for whoever set `EAGLE_TRACE_RECORD_OTHERS` to give away.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from eagle_trace.errors import EagleTraceError, UsageError
from eagle_trace_serving.answers import TOKEN_HEADER

#: traces that clients without a key may leave lying at once
MOST_KEPT = 8
#: recordings whose tokens are known
MOST_KNOWN = 1024
#: each start takes hooks on and off, and writes a folder
MOST_STARTS, START_SECONDS = 20, 3.0


class DeniedError(EagleTraceError):
    """Whoever asks may not do that.

    Attributes:
        status: of the answer.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Keys:
    """What guards a server.

    Attributes:
        api_keys: what the server was started with; each of them is as good as any other.
        admin_api_key: the key of its management routes, which then takes no other.
        record_others: without any key, everybody may do everything.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    record_others: bool = False

    def may_do_all(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers comes from somebody who may do everything.

        The server's own middleware may ask the same question before; this does not depend on how it finds the route.

        Raises:
            DeniedError: the server has a key, and this is not it; or it has none, and a page in a browser asks.
        """
        wanted = (self.admin_api_key,) if self.admin_api_key else self.api_keys
        if not wanted:
            _refuse_pages(headers)
            return self.record_others
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not _is_one_of(given, wanted):
            raise DeniedError("Unauthorized", 401)
        return True


class Tokens:
    """Which trace belongs to whom: a token for each recording that was started over HTTP; only digests are kept."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}
        self._strangers: set[str] = set()

    def issue(self, name: str, *, stranger: bool) -> str:
        """A token for the recording `name`, just started."""
        token = secrets.token_urlsafe(24)
        if stranger:
            self._strangers.add(name)
        self._digests[name] = _digest(token)
        for old in [old for old in self._digests if old not in self._strangers][:-MOST_KNOWN]:
            del self._digests[old]
        return token

    def name(self, headers: Mapping[str, str]) -> str | None:
        """The recording that was started by whoever sends these headers; None if that is not known."""
        given = _digest(headers.get(TOKEN_HEADER.lower(), ""))
        return next((name for name, known in list(self._digests.items()) if secrets.compare_digest(known, given)), None)

    def make_room(self, there: Callable[[str], bool]) -> None:
        """Forget the traces that are gone; refuse one more of somebody without a key where too many lie about.

        Raises:
            UsageError: too many do.
        """
        for name in [name for name in self._strangers if not there(name)]:
            self._digests.pop(name, None)
            self._strangers.discard(name)
        if len(self._strangers) >= MOST_KEPT:
            raise UsageError(
                f"{MOST_KEPT} traces that clients without a key recorded lie on this server already, and it takes no "
                "more: whoever recorded them must fetch or remove one"
            )


class Pace:
    """How often somebody without a key may start: `MOST_STARTS` times at once, then once per `START_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at = float(MOST_STARTS), clock()

    def take(self) -> None:
        """Count one more start.

        Raises:
            DeniedError: it is one too many.
        """
        now = self._clock()
        self._left = min(float(MOST_STARTS), self._left + (now - self._at) / START_SECONDS)
        self._at = now
        if self._left < 1:
            raise DeniedError(
                f"clients without a key start a recording once per {START_SECONDS:.0f} s at most: ask again", 429
            )
        self._left -= 1


def _refuse_pages(headers: Mapping[str, str]) -> None:
    """Refuse what a page in somebody's browser asks of a server that only they can reach (servers allow any origin)."""
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        raise DeniedError("a server without a key takes no orders from pages in a browser", 403)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_one_of(given: str, wanted: Iterable[str]) -> bool:
    # all are looked at, so that time does not tell which one it was
    return sum(secrets.compare_digest(_digest(given), _digest(key)) for key in wanted) > 0
