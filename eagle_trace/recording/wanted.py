"""What a recording is to keep, and how long it may take: the same for every host.

Command line, HTTP body, environment and Python all end in a `Wanted`. A further option is a field here, with how it is
read from text in `TEXTS`, and an option of ``eagle-trace record``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_trace.capture import LEVELS
from eagle_trace.errors import UsageError
from eagle_trace.patience import check_wait, parse_wait
from eagle_trace.selection import EVERYTHING, Selection, parse_bytes


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

    level: str = "values"
    max_bytes: int | None = None
    selection: Selection = field(default=EVERYTHING)
    keep_cuda_graphs: bool = False
    seconds: float | None = None
    max_wait: float | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {self.level!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"the byte budget must be a positive number of bytes, not {self.max_bytes}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"the time limit must be a positive number of seconds, not {self.seconds}")
        if self.max_wait is not None:
            check_wait(self.max_wait)


def _seconds(text: str, name: str) -> float | None:
    try:
        return float(text) or None
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {text!r}") from error


#: how each field is read from the text of a variable, whose name is for messages
TEXTS: Mapping[str, Callable[[str, str], Any]] = {
    "level": lambda text, _name: text,
    "max_bytes": lambda text, _name: parse_bytes(text),
    "keep_cuda_graphs": lambda text, _name: text not in ("", "0"),
    "seconds": _seconds,
    "max_wait": parse_wait,
}
#: what `selection` is read from
CHOICES = ("sites", "roots", "steps", "prompts")


def parse_wanted(given: Mapping[str, str], prefix: str, choices: tuple[str, ...] = CHOICES) -> dict[str, Any]:
    """Fields of `Wanted` as variables say them.

    Args:
        given: texts by the names of the fields and `choices`; other names are left alone.
        prefix: what the variables' names begin with.
        choices: which rows and sites can be chosen by.

    Raises:
        UsageError: a text is not of its kind.
    """
    said = {name: read(given[name], f"{prefix}{name.upper()}") for name, read in TEXTS.items() if given.get(name)}
    return said | {"selection": Selection.parse(**{name: given.get(name) for name in choices})}
