"""How options are declared: in groups for ``--help``, with names of values that no terminal is too narrow for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer


def option(panel: str, help: str, *names: str, **more: Any) -> Any:
    """An option in a group of ``--help``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def described(command: Callable[..., Any]) -> str:
    """The docstring of a command with whole paragraphs, which a terminal wraps at its own width."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
