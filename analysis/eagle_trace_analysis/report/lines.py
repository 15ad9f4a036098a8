"""Lines of a terminal report: what is quoted in them is printable, and what is too long for one hangs under itself."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from eagle_trace.printable import printable

INDENT = 2
#: the least room for words, however narrow a terminal is
LEAST = 30


def wrapped(console: Console, words: str, indent: int = INDENT) -> list[str]:
    """`words` in the lines that fit behind an indent, without it."""
    found = Text(printable(words)).wrap(console, max(LEAST, console.width - indent))
    return [part.plain.rstrip() for part in found]


def hang(console: Console, words: str, head: Text | str = " " * INDENT, style: str = "") -> None:
    """Print `words` behind a head, further lines under the first one's words."""
    head = Text(head) if isinstance(head, str) else head
    for number, part in enumerate(wrapped(console, words, head.cell_len)):
        before = head if number == 0 else Text(" " * head.cell_len)
        console.print(before + Text(part, style=style), soft_wrap=True)


def section(console: Console, title: str, lines: Iterable[str]) -> None:
    """Print a title and its lines; nothing where there are none."""
    listed = list(lines)
    if listed:
        console.print(Text(title, style="bold"))
    for line in listed:
        hang(console, line)
