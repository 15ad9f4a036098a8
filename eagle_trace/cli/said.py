"""Sentences for whoever typed a command: in a terminal they are wrapped at its width, and commands in them are not."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

import typer

from eagle_trace.printable import printable

#: what is there to be copied: between backticks, or an installation
_COMMAND = re.compile(r"`[^`\n]+`|pip install( -\S+)* ('[^'\n]+'|\S+)")
#: stands for a blank in a command
_BLANK = "\0"


def say(text: str, *, err: bool = False) -> None:
    """Print sentences, to standard output or standard error, such that nothing in them steers a terminal."""
    text = printable(text, keep="\n\t")
    stream = sys.stderr if err else sys.stdout
    typer.echo(wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text, err=err)


def wrapped(text: str, width: int) -> str:
    """Each line of a text in lines of at most `width` columns; a command that is longer has a line of its own."""
    return "\n".join(line if len(line) <= width else _wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _BLANK), line)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_BLANK, " ")


def next_line(command: str) -> str:
    """What to type next, on a line of its own where a terminal is too narrow for both."""
    command = printable(command)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return f"Next:\n  {command}" if width is not None and len(command) + 6 > width else f"Next: {command}"
