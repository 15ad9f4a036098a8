"""Recording a training command that knows nothing of it: armed by the environment, begun at its first forward.

With ``EAGLE_TRACE_TRAIN_OUT`` set, `install` watches for the import of the modules that the installed hosts' packages
name (in `watch.WATCHED`; it imports none of these modules itself). The first forward of a draft of theirs then begins a
`recording` of it, which ends by itself. Without the variable nothing happens at all. Whatever is wrong here is logged,
never raised: the command is somebody's training.

| variable | meaning |
| --- | --- |
| EAGLE_TRACE_TRAIN_OUT | folder of the trace |
| EAGLE_TRACE_TRAIN_BATCHES | forwards to record, 2 if unset |
| EAGLE_TRACE_TRAIN_LEVEL | shapes, stats, sketch or values (the default) |
| EAGLE_TRACE_TRAIN_MAX_BYTES | stop after so many bytes of captures |
| EAGLE_TRACE_TRAIN_FIRST_TOKEN | first token of documents that the training data does not hold |
| EAGLE_TRACE_TRAIN_MAX_WAIT | how long the training may wait for the disk, in all, in seconds (0.2) |
| EAGLE_TRACE_TRAIN_{SITES,ROOTS,STEPS,PROMPTS} | what to keep, as `Selection.parse` reads it |
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace.recording.wanted import Wanted

PREFIX = "EAGLE_TRACE_TRAIN_"
OUT = f"{PREFIX}OUT"
HOSTS = "eagle_trace.hosts"
#: what is said in numbers beside what every recording is asked
NUMBERS = ("batches", "first_token")

logger = logging.getLogger("eagle_trace")

_datasets: list[weakref.ref[Any]] = []


def install() -> None:
    """Watch for the trainers' models if the environment asks for a recording; once, however often it is called."""
    if os.environ.get(OUT):
        watch(watched())


def watch(modules: Mapping[str, Callable[[Any], None]]) -> None:
    """Call, with each of these modules, what is beside its name when it was executed; modules watched already stay so.

    Args:
        modules: what to call, by the module's name.
    """
    watcher = next((finder for finder in sys.meta_path if isinstance(finder, _Watcher)), None)
    if watcher is None:
        watcher = _Watcher()
        sys.meta_path.insert(0, watcher)
    watcher.watch(modules)


def watched() -> dict[str, Callable[[Any], None]]:
    """What the installed hosts wait for: modules, each with what is to be called when it was executed."""
    found: dict[str, Callable[[Any], None]] = {}
    for package in sorted({entry.module.partition(".")[0] for entry in entry_points(group=HOSTS)}):
        if find_spec(f"{package}.watch") is not None:
            found |= import_module(f"{package}.watch").WATCHED
    return found


class _Watcher(MetaPathFinder):
    """Lets the others find modules, and is told when one of those that are watched was executed."""

    def __init__(self) -> None:
        self._watched: dict[str, Callable[[Any], None]] = {}

    def watch(self, modules: Mapping[str, Callable[[Any], None]]) -> None:
        self._watched = {**modules, **self._watched}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec of a watched module, whose loader calls back; None for all others."""
        if (ready := self._watched.get(name)) is None:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Watcher)]
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                ready(module)
            except Exception as error:  # noqa: BLE001 (somebody's training: said, never raised)
                logger.warning(
                    "eagle-trace cannot follow this version of %s: %s: %s", name.partition(".")[0], name, error
                )

        # a loader is made for one module only
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin_at_first_call(
    kind: type, package: str, method: str = "__call__", wanted: Callable[[Any], bool] = lambda _: True
) -> None:
    """Begin with the first forward: `package.recording` of the object whose `method` is called.

    Args:
        kind: the trainer's class.
        package: the trainer's host package.
        method: the latest point at which hooks still see that forward.
        wanted: whether it is a draft that can be recorded.
    """
    original = vars(kind).get(method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted(self) and vars(kind).get(method) is call:
            if original is None:
                delattr(kind, method)
            else:
                setattr(kind, method, original)
            _begin(self, package)
        run = getattr(super(kind, self), method) if original is None else original.__get__(self)
        return run(*args, **kwargs)

    setattr(kind, method, call)


def remember_datasets(kind: type) -> None:
    """Remember what is made of the trainer's class of data sets: it holds the first tokens, which batches lack."""
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _datasets.append(weakref.ref(self))

    kind.__init__ = init  # type: ignore[misc]


def _begin(model: Any, package: str) -> None:
    try:
        datasets = tuple(dataset for ref in _datasets if (dataset := ref()) is not None)
        run = import_module(package).recording(model, dataset=datasets, **_options(os.environ))
        run.__enter__()
    except Exception as error:  # noqa: BLE001 (somebody's training: said, never raised)
        logger.warning("eagle-trace does not record this training: %s", error)
        return
    # before `live` waits for its seals: what is registered last runs first
    atexit.register(lambda: run.finish(f"the process ended after {run.batches} batches"))


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `recording` from environment variables.

    Raises:
        UsageError: a value is not of its kind.
    """
    from eagle_trace.errors import UsageError
    from eagle_trace.recording.wanted import NAMES, parse_wanted

    names = ("out", *NUMBERS, *NAMES)
    given = {name: value for name in names if (value := environment.get(f"{PREFIX}{name.upper()}"))}
    options: dict[str, Any] = {"out": given["out"]} if "out" in given else {}
    for name in NUMBERS:
        if name in given:
            try:
                options[name] = int(given[name])
            except ValueError as error:
                raise UsageError(f"{PREFIX}{name.upper()} must be a number, not {given[name]!r}") from error
    return options | parse_wanted(given, PREFIX)


def environment(wanted: Wanted, **options: Any) -> dict[str, str]:
    """The variables that say what to keep, and the other `options` of `recording`: out, batches, first_token."""
    values = options | wanted.said()
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items() if value is not None}
