"""Which releases of a trainer can be recorded: those that were tested, and any that has every place that is needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from eagle_trace.errors import HostError


@dataclass(frozen=True)
class Releases:
    """A trainer's releases.

    Attributes:
        title: as sentences have it.
        package: as `importlib.metadata` has it.
        tested: releases whose recording was compared with a server's and agreed (docs/support.md), newest first.
        needed: what recording replaces, wraps or looks at, as ``module:Class.attribute``.
        arguments: names of arguments that are given to a function among them.
        install: how pip is called for it.
    """

    title: str
    package: str
    tested: Sequence[str]
    needed: Sequence[str]
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    install: str = "pip install"

    def check(self) -> list[str]:
        """What a recording with the installed release must be warned of: nothing for a release that was tested.

        Raises:
            HostError: it cannot be imported, or a place is missing; the message says which, and the way out.
        """
        try:
            lacking = [place for place in self.needed if not _has(place)]
            lacking += [] if lacking else [one for place in self.arguments for one in self._not_taken(place)]
        except ImportError as error:
            raise HostError(f"{self.title} cannot be imported ({error}). {self._way_out}") from error
        if lacking:
            raise self.refused(f"it lacks {', '.join(lacking)}")
        name = version(self.package)
        if name in self.tested:
            return []
        return [
            f"{self.title} {name} is not among the releases eagle-trace was tested with ({', '.join(self.tested)}); "
            "all that recording needs is there, so it went on"
        ]

    def refused(self, why: str) -> HostError:
        """The error of a release that cannot be recorded."""
        return HostError(f"{self.title} {version(self.package)} is not supported: {why}. {self._way_out}")

    def other(self, does: str, made_for: str) -> HostError:
        """The error of a release whose draft is found to be another one than the recorder knows.

        Args:
            does: what this release does.
            made_for: the verb of what the known one does instead.
        """
        return HostError(
            f"this version of {self.package} {does}, which the one this recorder was written for ({self.tested[0]}) "
            f"{made_for}: install that one, or report it"
        )

    @property
    def _way_out(self) -> str:
        return f"Supported is {', '.join(self.tested)}: {self.install} '{self.package}=={self.tested[0]}'"

    def _not_taken(self, place: str) -> list[str]:
        taken = inspect.signature(_find(place)).parameters
        return [f"the argument {name} of {place}" for name in self.arguments[place] if name not in taken]


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    return attrgetter(path)(import_module(module))


def _has(place: str) -> bool:
    try:
        return _find(place) is not None
    except AttributeError:
        return False
