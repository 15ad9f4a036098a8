"""Which requests a recording takes, and under which number."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eagle_trace.errors import UsageError
from eagle_trace.prompts import content_key, unique_key
from eagle_trace.writer import DP_STRIDE

#: SGLang's own probes; they are no request of anybody
OWN_REQUESTS = ("HEALTH_CHECK",)
#: how many requests of others are recorded unless somebody says
DEFAULT_REQUESTS = 8
#: how many prompts a trace can number
MOST_REQUESTS = DP_STRIDE


@dataclass(frozen=True)
class Admission:
    """What makes a request one that is recorded; every rank of a server decides alike, without asking the others.

    Attributes:
        named: prompt number and prompt key of each request id to take; None to take whoever comes.
        requests: take no more than so many; None for no limit.
        match: take request ids in which this regular expression is found.
        sample: take this share (0..1) of the request ids, chosen by a digest of each.
    """

    named: Mapping[str, tuple[int, str]] | None = None
    requests: int | None = None
    match: str = ""
    sample: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise UsageError(f"{self.match!r} is no regular expression for request ids: {error}") from error
        if not 0 < self.sample <= 1:
            raise UsageError(f"the share of requests to sample must be above 0 and at most 1, not {self.sample}")
        if self.requests is not None and self.requests < 1:
            raise UsageError(f"the number of requests to record must be 1 or more, not {self.requests}")
        if self.requests is not None and self.requests > MOST_REQUESTS:
            raise UsageError(f"a trace numbers its prompts up to {MOST_REQUESTS}: ask for that many requests at most")
        numbers = [number for number, _ in (self.named or {}).values()]
        if len(set(numbers)) != len(numbers) or not all(0 <= number < MOST_REQUESTS for number in numbers):
            raise UsageError(f"each request that is named needs a number of its own, from 0 to {MOST_REQUESTS - 1}")

    def wants(self, rid: str) -> bool:
        """Whether request `rid` is one to record."""
        if self.named is not None:
            return rid in self.named
        if rid.startswith(OWN_REQUESTS) or not re.search(self.match, rid):
            return False
        share = int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "big") / 2**64
        return share < self.sample

    @property
    def limit(self) -> int | None:
        """How many requests there will be, if that is known."""
        return self.requests if self.named is None else len(self.named)


@dataclass
class Admitted:
    """The requests that one recording took so far."""

    admission: Admission
    ids: dict[str, int] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    _seen: dict[str, int] = field(default_factory=dict)

    def take(self, rid: str, token_ids: Sequence[int]) -> bool:
        """Take request `rid` with the prompt `token_ids` if it is one to record and there is room for it."""
        if rid in self.ids or self.full or not self.admission.wants(rid):
            return False
        if self.admission.named is not None:
            number, key = self.admission.named[rid]
        else:
            number = len(self.ids)
            key = unique_key(content_key("input_ids", list(token_ids)), self._seen)
        self.ids[rid] = number
        self.keys[number] = key
        return True

    @property
    def full(self) -> bool:
        """Whether no further request will be taken."""
        limit = self.admission.limit
        return limit is not None and len(self.ids) >= limit

    @property
    def done(self) -> bool:
        """Whether every request there will be has ended."""
        return self.full and len(self.ended) == len(self.ids)
