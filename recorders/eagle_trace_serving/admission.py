"""Which requests a recording takes, and under which number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eagle_trace.errors import UsageError
from eagle_trace.prompts import LateKeys
from eagle_trace.writer import DP_STRIDE

#: how many requests of others are recorded unless somebody says
DEFAULT_REQUESTS = 8
#: a client chooses its request ids, and the scheduler's thread looks at each of them
LONGEST_ID = 1024
LONGEST_PATTERN = 256
#: what a pattern of request ids holds only where somebody meant a regular expression
_REGULAR = frozenset("^$()[]{}|\\")
#: how many prompts a trace can number
MOST_REQUESTS = DP_STRIDE


@dataclass(frozen=True)
class Admission:
    """What makes a request one that is recorded; every rank of a server decides alike, without asking the others.

    Attributes:
        named: prompt number and prompt key of each request id to take; None to take whoever comes.
        requests: take no more than so many; None for no limit.
        match: take request ids of this form: ``*`` stands for any text (``eval-*``), all else for itself; empty: any.
        sample: take this share (0..1) of the request ids, chosen by a digest of each.
    """

    named: Mapping[str, tuple[int, str]] | None = None
    requests: int | None = None
    match: str = ""
    sample: float = 1.0

    def __post_init__(self) -> None:
        if len(self.match) > LONGEST_PATTERN:
            raise UsageError(f"a pattern of request ids has at most {LONGEST_PATTERN} letters, not {len(self.match)}")
        if wrong := _REGULAR & set(self.match):
            raise UsageError(
                f"{self.match!r} is not a pattern of request ids such as eval-*: * stands for any text, and "
                f"{min(wrong)} is not used (regular expressions are not taken)"
            )
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
        """Whether request `rid` is one to record; its client chose it, so it may be anything."""
        if not isinstance(rid, str):
            return False
        if self.named is not None:
            return rid in self.named
        if len(rid) > LONGEST_ID or not (self.match in ("", rid) or self._fits(rid)):
            return False
        try:
            encoded = rid.encode()
        except UnicodeEncodeError:
            return False  # half a surrogate pair is no text, and no table could hold it
        share = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") / 2**64
        return share < self.sample

    def _fits(self, rid: str) -> bool:
        """Whether `rid` is of the form `match`: the texts between the stars, in order, each at its first place."""
        first, *middle = self.match.split("*")
        if not middle or not rid.startswith(first):
            return False
        last = middle.pop()
        at, end = len(first), len(rid) - len(last)
        for text in middle:
            found = rid.find(text, at, end)
            if found < 0:
                return False
            at = found + len(text)
        return at <= end and rid.endswith(last)

    @property
    def limit(self) -> int | None:
        """How many requests there will be, if that is known."""
        return self.requests if self.named is None else len(self.named)


@dataclass
class Admitted:
    """The requests that one recording took so far."""

    admission: Admission
    ids: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    _keys: LateKeys = field(default_factory=LateKeys)

    def take(self, rid: str, token_ids: Sequence[int]) -> bool:
        """Take request `rid` with the prompt `token_ids` if it is one to record and there is room for it."""
        if self.full or not self.admission.wants(rid) or rid in self.ids:
            return False
        if self.admission.named is not None:
            self.ids[rid] = self.admission.named[rid][0]
        else:
            self._keys.add(token_ids)
            self.ids[rid] = len(self.ids)
        return True

    def key(self, rid: str) -> str:
        """Prompt key of a request that was taken. Takes time for a long prompt: not for the scheduler's thread."""
        if self.admission.named is not None:
            return self.admission.named[rid][1]
        return self._keys[self.ids[rid]]

    @property
    def full(self) -> bool:
        """Whether no further request will be taken."""
        limit = self.admission.limit
        return limit is not None and len(self.ids) >= limit

    @property
    def done(self) -> bool:
        """Whether every request there will be has ended."""
        return self.full and len(self.ended) == len(self.ids)
