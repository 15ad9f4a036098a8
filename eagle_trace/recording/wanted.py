"""What a recording is to keep, and how long it may take: the same for every host.

Command line, HTTP body, environment and Python all end in a `Wanted`. A further option is a field here, which says of
what kind it is, and an option of ``eagle-trace record``; bodies and variables follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from eagle_trace.capture import LEVELS
from eagle_trace.errors import UsageError
from eagle_trace.patience import check_wait, parse_wait
from eagle_trace.selection import EVERYTHING, Selection, parse_bytes

#: of what kind an option is: this says how it is read from text (`READERS`), and what a client may send for it
#: (`eagle_trace_serving.bodies`); no client says what is the ``host``'s own affair
Kind = Literal["level", "bytes", "flag", "seconds", "host"]


def _option(kind: Kind, default: Any) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to keep.

    Attributes:
        level: how much to keep of each row.
        max_bytes: stop recording, not the host, after so many bytes of captures; None for no limit.
        selection: which sites and rows to keep.
        keep_cuda_graphs: let a server replay its CUDA graphs, and record at their boundaries only.
        seconds: seal after so long, whatever is still going on; None for no limit.
        max_wait: how long the host may wait for the disk, in all [s]; None for what the host's side has been told.

    Raises:
        UsageError: a value makes no sense.
    """

    level: str = _option("level", "values")
    max_bytes: int | None = _option("bytes", None)
    selection: Selection = EVERYTHING
    keep_cuda_graphs: bool = _option("flag", False)
    seconds: float | None = _option("seconds", None)
    max_wait: float | None = _option("host", None)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {self.level!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"the byte budget must be a positive number of bytes, not {self.max_bytes}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"the time limit must be a positive number of seconds, not {self.seconds}")
        if self.max_wait is not None:
            check_wait(self.max_wait)

    def said(self) -> dict[str, Any]:
        """What differs from the defaults, by the names that variables and bodies have; `read` reads it."""
        differs = {name: value for name in KINDS if (value := getattr(self, name)) != getattr(Wanted, name)}
        told = {name: str(value) if KINDS[name] == "bytes" else value for name, value in differs.items()}
        return told | self.selection.to_text()


def _seconds(text: str, name: str) -> float | None:
    try:
        return float(text) or None
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {text!r}") from error


#: how an option of a kind is read from text; the name of what says it is for messages
READERS: Mapping[Kind, Callable[[str, str], Any]] = {
    "level": lambda text, _name: text,
    "bytes": lambda text, _name: parse_bytes(text),
    "flag": lambda text, _name: text.lower() not in ("", "0", "false", "no"),
    "seconds": _seconds,
    "host": parse_wait,
}
#: the kind of each field, but for `selection`
KINDS: Mapping[str, Kind] = {one.name: one.metadata["kind"] for one in fields(Wanted) if "kind" in one.metadata}
#: what `selection` is read from
CHOICES = ("sites", "roots", "steps", "prompts")
#: every name by which something can be said
NAMES = (*KINDS, *CHOICES)


def read(name: str, said: Any, called: str = "") -> Any:
    """The value of a field as somebody says it: a text is read, anything else is the value.

    Args:
        name: of the field.
        said: what is said.
        called: what it is called where it is said.

    Raises:
        UsageError: a text is not of its kind.
    """
    return READERS[KINDS[name]](said, called or name) if isinstance(said, str) else said


def parse_wanted(given: Mapping[str, str], prefix: str, choices: tuple[str, ...] = CHOICES) -> dict[str, Any]:
    """Fields of `Wanted` as variables say them.

    Args:
        given: texts by the names of the fields and `choices`; other names are left alone.
        prefix: what the variables' names begin with.
        choices: which rows and sites can be chosen by.

    Raises:
        UsageError: a text is not of its kind.
    """
    said = {name: read(name, given[name], f"{prefix}{name.upper()}") for name in KINDS if given.get(name)}
    return said | {"selection": Selection.parse(**{name: given.get(name) for name in choices})}
