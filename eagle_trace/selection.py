"""What of a forward is kept: sites by name, rows by prompt, root and step.

A selection narrows what is recorded, never what is known about it: shapes of every site are kept all the same, so
that a site that was left out is not taken for one that the host does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.errors import UsageError
from eagle_trace.sites import known_names

#: what a selection may consist of: the server's scheduler asks it at every forward, and anybody may send one
MOST_PATTERNS, LONGEST_PATTERN, MOST_RANGES = 100, 100, 1000
#: above every number that names a row
END = 1 << 31

#: half-open ranges of integers; None where a range has no end
Ranges = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class Selection:
    """Which captures to keep; an empty field keeps all.

    Attributes:
        sites: patterns of site names (``fc.*``, ``layer.0.attn.*``), as `fnmatch` reads them.
        roots: ranges of roots: positions of the prompt (and its answer) that a draft row starts from.
        steps: ranges of draft steps, 0 being the extend row.
        prompts: ranges of prompt numbers.
    """

    sites: tuple[str, ...] = ()
    roots: Ranges = ()
    steps: Ranges = ()
    prompts: Ranges = ()

    @classmethod
    def parse(
        cls, *, sites: str | None = None, roots: str | None = None, steps: str | None = None, prompts: str | None = None
    ) -> Selection:
        """A selection from comma-separated text, as the command line and the environment give it.

        Args:
            sites: ``fc.*,logits``.
            roots: ``0:64,100`` (numbers, or ranges without their end).
            steps: as `roots`.
            prompts: as `roots`.

        Raises:
            UsageError: not of that form.
        """
        patterns = tuple(word.strip() for word in (sites or "").split(",") if word.strip())
        if len(patterns) > MOST_PATTERNS or max(map(len, patterns), default=0) > LONGEST_PATTERN:
            raise UsageError(
                f"sites are chosen by at most {MOST_PATTERNS} patterns of at most {LONGEST_PATTERN} letters: "
                "use * for what they have in common"
            )
        names = known_names() if patterns else []
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"no site is called {pattern!r}: names are such as fc.out, layer.0.attn.q, logits, topk.draft_id, "
                    "and * stands for anything"
                )
        return cls(patterns, parse_ranges(roots), parse_ranges(steps), parse_ranges(prompts))

    @property
    def all_rows(self) -> bool:
        """Whether no row is left out."""
        return not (self.roots or self.steps or self.prompts)

    def wants(self, site: str) -> bool:
        """Whether the rows of `site` are kept."""
        return not self.sites or _matches(self.sites, site)

    def wants_step(self, step: int) -> bool:
        """Whether any row of a step may be kept."""
        return not self.steps or bool(np.searchsorted(_borders(self.steps), step, side="right") % 2)

    def mask(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of `rows` are kept, bool [T]."""
        kept = np.ones(len(rows), dtype=np.bool_)
        for column, ranges in ((rows.root, self.roots), (rows.step, self.steps), (rows.prompt_id, self.prompts)):
            if ranges:
                # the ranges' borders in order: a number is inside if an odd one is the last at or below it
                kept &= np.searchsorted(_borders(ranges), column, side="right") % 2 == 1
        return kept

    def to_dict(self) -> dict[str, Any]:
        """The fields that leave something out, for the manifest."""
        return {name: [*value] for name, value in asdict(self).items() if value}

    def to_text(self) -> dict[str, str]:
        """The fields as `parse` takes them, those that leave something out."""
        text = {name: _as_text(getattr(self, name)) for name in ("roots", "steps", "prompts")}
        return {name: value for name, value in ({"sites": ",".join(self.sites)} | text).items() if value}


#: leaves nothing out
EVERYTHING = Selection()


def _as_text(ranges: Ranges) -> str:
    return ",".join(f"{low}:{'' if high is None else high}" for low, high in ranges)


@lru_cache(maxsize=4096)
def _matches(patterns: tuple[str, ...], site: str) -> bool:
    """Whether one of `patterns` is that of `site`; asked for every site of every forward."""
    return any(fnmatchcase(site, pattern) for pattern in patterns)


@lru_cache(maxsize=64)
def _borders(ranges: Ranges) -> NDArray[np.int64]:
    """Begin and end of ranges that cover the same numbers and do not touch, ascending, int64 [2 * ranges]."""
    merged: list[list[int]] = []
    for low, high in sorted((low, END if high is None else high) for low, high in ranges):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return np.array(merged, dtype=np.int64).reshape(-1)


def parse_ranges(text: str | None) -> Ranges:
    """``0:64,100`` as half-open ranges; nothing for None or an empty text.

    Raises:
        UsageError: a part is neither a number nor a range of two numbers in order.
    """
    ranges: list[tuple[int, int | None]] = []
    parts = (text or "").split(",", MOST_RANGES)
    if len(parts) > MOST_RANGES:
        raise UsageError(f"at most {MOST_RANGES} ranges can be chosen: join those that touch")
    for part in parts:
        low, colon, high = part.strip().partition(":")
        if not low and not colon:
            continue
        try:
            start = int(low or 0)
            stop = (int(high) if high else None) if colon else start + 1
        except ValueError:
            start, stop = 0, 0
        if not 0 <= start < END or (stop is not None and not start < stop <= END):
            raise UsageError(
                f"{part.strip()[:40]!r} is no number and no range such as 0:64 (from 0 up to but without 64)"
            )
        ranges.append((start, stop))
    return tuple(ranges)


def select_prompts(count: int, selection: Selection) -> Sequence[int]:
    """Numbers of the prompts that are kept, of `count`."""
    if not selection.prompts:
        return range(count)
    inside = np.searchsorted(_borders(selection.prompts), np.arange(count), side="right") % 2
    return [int(number) for number in np.flatnonzero(inside)]


def parse_bytes(text: str) -> int:
    """A number of bytes with an optional decimal unit (KB, MB, GB, TB).

    Raises:
        UsageError: not a positive amount.
    """
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
    upper = text.strip().upper()
    for unit, factor in units.items():
        if upper.endswith(unit):
            try:
                amount = float(upper.removesuffix(unit)) * factor
            except ValueError:
                break
            if 1 <= amount < float("inf"):
                return int(amount)
            break
    raise UsageError(f"a byte budget must be a positive amount such as 500MB or 4GB, not {text!r}")
