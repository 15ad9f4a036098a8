"""What the fields of a JSON document must be: small predicates that are put together into a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: whether a value is what it must be
Check = Callable[[Any], bool]

#: deeper than any setting or checkpoint's config, and far from what Python's own recursion bears
MOST_NESTED = 32
#: no number that somebody counts to, and one that any JSON reader holds
LARGEST = 1 << 62


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def whole(value: Any) -> bool:
    """A whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def small(value: Any) -> bool:
    """A size or a number of layers: from 0 on, and nothing that a loop could hang in."""
    return whole(value) and 0 <= value < 1 << 24


def count(value: Any) -> bool:
    """A whole number from 0 on."""
    return whole(value) and value >= 0


def seconds(value: Any) -> bool:
    """A span of time: a finite number from 0 on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def plain(value: Any, depth: int = MOST_NESTED) -> bool:
    """Anything that JSON holds, in bounds: numbers finite and not huge, lists and mappings nested not too deeply."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(value)
    if isinstance(value, Mapping):
        return depth > 0 and all(text(name) and plain(one, depth - 1) for name, one in value.items())
    if isinstance(value, list):
        return depth > 0 and all(plain(one, depth - 1) for one in value)
    return value is None or isinstance(value, str | bool)


def writable(value: Any, depth: int = MOST_NESTED) -> Any:
    """`value` such that `plain` holds of it: what it does not hold of is written as text."""
    if plain(value, 0) or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and depth > 0:
        return {str(name): writable(one, depth - 1) for name, one in value.items()}
    if isinstance(value, list | tuple) and depth > 0:
        return [writable(one, depth - 1) for one in value]
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    try:
        return str(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list of lists of lists ...
        return f"<{type(value).__name__}>"


def optional(check: Check) -> Check:
    """Null, or what `check` says."""
    return lambda value: value is None or check(value)


def one_of(*words: str) -> Check:
    """One of some words."""
    return lambda value: isinstance(value, str) and value in words


def listed(check: Check) -> Check:
    """A list of what `check` says."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def mapped(check: Check, names: Check = text) -> Check:
    """A mapping from `names` to what `check` says."""
    return lambda value: isinstance(value, Mapping) and all(names(name) and check(one) for name, one in value.items())


@dataclass(frozen=True)
class Table:
    """A mapping whose entries are each of their own type.

    Attributes:
        known: check of each entry by its name.
        others: check of entries of other names.
        required: entries that must be there.
    """

    known: Mapping[str, Check]
    others: Check
    required: Sequence[str] = field(default=())

    def fitted(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """`value`, with what is of another type than it must be under a name of its own."""
        good = {name: one for name, one in value.items() if self.known.get(name, self.others)(one)}
        return good | {f"{name} (as given)": str(one) for name, one in value.items() if name not in good}

    def __call__(self, value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and all(name in value for name in self.required)
            and all(text(name) and self.known.get(name, self.others)(one) for name, one in value.items())
        )
