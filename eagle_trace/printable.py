"""Quoted text made printable: what comes from a server, a trace, a checkpoint or a file name steers no terminal.

Everything that is shown goes through one of these at the edge where it leaves the program: `printable` (terminals, and
all that lays text out), `json_text` and `html_text`. Shown as an escape is what has no glyph of its own: control
characters (C0, DEL, C1), what turns the direction of text, zero-width and tag characters, separators of lines and
paragraphs, lone surrogates, private and unassigned code points.
"""

from __future__ import annotations

import html
import unicodedata

#: letters and marks by their category, but blank or without any width
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")


def _shown(one: str) -> bool:
    return (one.isprintable() or unicodedata.category(one) == "Zs") and one not in _BLANK


def printable(words: object, keep: str = "") -> str:
    """`words` as text of which every character is seen; those in `keep` (line ends, tabs) stay as they are."""
    text = str(words)
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in keep or _shown(one) else _escape(one) for one in text)


def _escape(one: str) -> str:
    code = ord(one)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def json_text(text: str) -> str:
    """JSON in which every character is seen; it means the same."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    # outside of strings, JSON has no character that would need it
    return "".join(one if one == "\n" or _shown(one) else _json_escape(one) for one in text)


def _json_escape(one: str) -> str:
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def html_text(words: object) -> str:
    """Text for HTML, also inside quoted attributes."""
    return html.escape(printable(words, keep="\n\t"), quote=True)
