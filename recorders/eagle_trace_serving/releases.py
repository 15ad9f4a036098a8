"""Which release of a server is installed, and whether a recorder can be hung into it: asked before anything starts.

The answer comes from the package's metadata and from its sources, parsed and not run: importing a server takes seconds
and wants its whole environment, and a plugin that finds out later is only logged by its server.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eagle_trace.errors import HostError
from eagle_trace_serving.sources import HookPoint, missing_names

UNKNOWN = "of an unknown version"


@dataclass(frozen=True)
class Releases:
    """The releases of one server.

    Attributes:
        title: its name, as sentences have it.
        package: what is imported.
        install: what to do where it is not installed.
        tested: releases whose recording was compared with the training forward and agreed, newest first.
        hook_points: what recording stands on.
        folder: of its sources below the package, where hook points are found.
        distributions: names it is installed by, and the local version that is added to each (``+cpu`` for a wheel of
            its own); by default the package's.
        wrong_on_cpu: releases that have every hook point and compute something wrong on a CPU, and what: a recording
            there would name a fault that the same release does not have on a GPU.
    """

    title: str
    package: str
    install: str
    tested: Sequence[str]
    hook_points: Sequence[HookPoint]
    folder: str = ""
    distributions: Mapping[str, str] = field(default_factory=dict)
    wrong_on_cpu: Mapping[str, str] = field(default_factory=dict)

    def installed(self) -> tuple[str, Path]:
        """Version of the server that an import here would find, and the folder of its sources.

        Raises:
            HostError: there is none.
        """
        found = importlib.util.find_spec(self.package)
        if found is None or not found.submodule_search_locations:
            raise HostError(f"{self.title} is not installed here: {self.install}")
        return self._version(), Path(next(iter(found.submodule_search_locations))) / self.folder

    def _version(self) -> str:
        for name, local in (self.distributions or {self.package: ""}).items():
            try:
                found = version(name)
            except PackageNotFoundError:
                continue
            return found if local.lstrip("+") in found else found + local
        return UNKNOWN

    def check(self, device: str) -> list[str]:
        """What a recording with the installed release must be warned of: nothing for a release that was tested.

        Args:
            device: where the server is to run, `cpu` or `cuda`.

        Raises:
            HostError: it is not installed, or lacks a hook point; the message names it and the way out.
        """
        full, folder = self.installed()
        name = full.partition("+")[0]
        tested, refused = ", ".join(self.tested), ""
        if device == "cpu" and name in self.wrong_on_cpu:
            refused = self.wrong_on_cpu[name]
        elif lacking := [
            f"no {' or '.join(missing)} in {point.file} ({point.gives})"
            for point in self.hook_points
            if (device == "cpu" or not point.cpu) and (missing := missing_names(folder, point))
        ]:
            refused = f"it has {'; '.join(lacking)}"
        if refused:
            raise HostError(
                f"{self.title} {name} is not supported on {device}: {refused}. Supported are {tested}: install one of "
                f"them, for example pip install '{self.package}=={self.tested[0]}'"
            )
        if name in self.tested:
            return []
        return [
            f"{self.title} {name} is not among the releases eagle-trace was tested with ({tested}); it has every hook "
            "point, so the recording went on"
        ]
