"""One key of a config that the engine stops at, and how its value is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A key that the engine stops at.

    Attributes:
        key: in the config, with the object it is in (``rope_parameters.factor``).
        why: what it holds, and what the engine wants.
        fix: what to write instead.
    """

    key: str
    why: str
    fix: str


def shown(value: Any) -> str:
    """A value as the config spells it, long ones cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def not_an_object(key: str, value: Any) -> Refusal:
    """The refusal of a value that should be an object."""
    return Refusal(key, f"{key} is {shown(value)}, not an object", f"remove {key}")


def is_number(value: Any) -> bool:
    """Whether the engine can reckon with a JSON value (a boolean counts as 0 or 1)."""
    return isinstance(value, int | float)
