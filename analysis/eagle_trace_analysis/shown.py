"""How results show themselves in a notebook, registered from outside: a result knows nothing of reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DISPLAYS: dict[str, Callable[[Any], str]] = {}


def show_as(kind: str, display: Callable[[Any], str]) -> None:
    """Let `display` make the HTML that stands for a result whose class is called `kind`."""
    _DISPLAYS[kind] = display


def html_of(result: Any) -> str | None:
    """The HTML of a result; None (a notebook then takes the text) if nothing is registered for its class."""
    display = _DISPLAYS.get(type(result).__name__)
    return display(result) if display is not None else None
