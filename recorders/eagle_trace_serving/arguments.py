"""A server's command line: what the user's own arguments say in it, and ours beneath them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: what is noted where a recording turns it off
PREFIX_CACHE_OFF = "prefix cache off: a cached position is not computed, so it could not be recorded"


def value(words: Sequence[str], names: Sequence[str]) -> str:
    """What the last of the options `names` says; empty if there is none."""
    found = ""
    for at, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in names:
            found = text if equals else "".join(words[at + 1 : at + 2])
    return found


def number(words: Sequence[str], names: Sequence[str]) -> int:
    """What the last of the options `names` says; 1 if there is none, or none that is a number."""
    found = value(words, names)
    return int(found) if found.isascii() and found.isdecimal() and len(found) < 10 else 1


def names_of(words: Sequence[str]) -> set[str]:
    """The options among words, whatever is said of them."""
    return {word.split("=", 1)[0] for word in words}


def beneath(ours: Mapping[str, str], users: Sequence[str]) -> list[str]:
    """Our own options, without those that the user gives."""
    given = names_of(users)
    return [word for name, text in ours.items() if name not in given for word in (name, text)]
