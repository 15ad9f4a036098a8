"""The accept length of a draft while it trains, and where it first parts from its server, in the trainer's own logs.

>>> with monitoring(trainer, served="serve.trace", target="models/target", every=500):
...     trainer.run_training()

or without touching the training: ``EAGLE_TRACE_MONITOR=serve.trace speculators train ...``, see `docs/training.md`.

| variable | meaning |
| --- | --- |
| EAGLE_TRACE_MONITOR | serve trace whose prompts are replayed, or the URL of a running server |
| EAGLE_TRACE_MONITOR_TARGET | folder of the target, which computes the features |
| EAGLE_TRACE_MONITOR_EVERY | optimizer steps from one look to the next (500) |
| EAGLE_TRACE_MONITOR_{BASELINE,FEATURES,PROMPTS,LEVEL,DEVICE,MAX_NEW_TOKENS,API_KEY,ADMIN_API_KEY} | as `monitoring` |
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace.jobs.monitoring import Monitoring

__all__ = ["install", "monitoring"]

PREFIX = "EAGLE_TRACE_MONITOR"
_PATHS, _NUMBERS = ("target", "prompts"), ("every", "max_new_tokens")
_WORDS = ("baseline", "features", "level", "device", "api_key", "admin_api_key")

logger = logging.getLogger("eagle_trace")


def monitoring(
    trainer: Any,
    served: str | Path,
    *,
    log: Callable[[Mapping[str, float | str], int], None] | None = None,
    **options: Any,
) -> Monitoring:
    """Look at a draft while it trains: ``with monitoring(trainer, "serve.trace", target="models/target"): ...``.

    At the first step, every `every` steps and at the end, the prompts of `served` are run through the draft as it is in
    memory, and logged is (at the number of optimizer steps):

    - ``eagle_trace/accept_length``: what `diff` predicts, tokens per verify round, and ``accept_share_D`` by depth;
    - ``eagle_trace/first_divergence``: the number of the site at which training and server first part, in the order of
      the forward, -1 for none; ``first_divergence_at`` says which, where words can be logged;
    - ``eagle_trace/seconds``: what the look took.

    Nothing about the training changes: weights after any number of steps are the same to the last bit. What fails
    later is logged once under the name ``eagle_trace`` and ends the looking.

    Args:
        trainer: speculators' `Trainer`, SpecForge's `Trainer` or `TrainerController`, or the model of a loop of one's
            own (steps are then its forwards in training mode).
        served: serve trace, or the URL of a running server.
        log: takes the values, by name, and their step; the trainer's own loggers if None.
        options: those of `eagle_trace.jobs.monitoring.Watched`.

    Raises:
        EagleTraceError: no trainer of a kind that is known, or (on entering the block) the traces, the target or the
            draft are not what is needed.
    """
    from eagle_trace.errors import UsageError
    from eagle_trace.jobs.monitoring import Monitoring, Watched

    given = options | {name: Path(options[name]) for name in _PATHS if options.get(name) is not None}
    try:
        watched = Watched(str(served), **given)
    except TypeError as error:
        raise UsageError(f"monitoring: {error}") from error
    return Monitoring(_training(trainer), watched, log)


def _training(trainer: Any) -> Any:
    """What goes on in a trainer, as the host that it belongs to sees it."""
    from eagle_trace.errors import UsageError
    from eagle_trace.recording.hosts import known_hosts

    # whose program was not imported, its trainer it cannot be; and a forward of our own trains nothing
    hosts = [
        host
        for host in known_hosts("trainer").values()
        if host.module in sys.modules and not getattr(host, "stands_in", False)
    ]
    refused = []
    for host in hosts:
        try:
            return host.training(trainer)
        except UsageError as error:
            refused.append(str(error))
    raise UsageError(
        "; ".join(refused) or f"no trainer that is known here was imported, so {trainer!r} is none of them"
    )


# ---- a command that is not edited


def install() -> None:
    """Watch for the trainers' classes if the environment asks for it; once, however often it is called."""
    if not os.environ.get(PREFIX):
        return
    from eagle_trace_training import arm

    arm.watch({module: functools.partial(_around, *where) for module, where in _trainers().items()})


def _trainers() -> dict[str, tuple[str, str]]:
    """Class and method that train, by module, of all installed hosts."""
    found: dict[str, tuple[str, str]] = {}
    for package in sorted({entry.module.partition(".")[0] for entry in entry_points(group="eagle_trace.hosts")}):
        if find_spec(f"{package}.watch") is not None:
            found |= import_module(f"{package}.watch").TRAINERS
    return found


def _around(kind: str, method: str, module: Any) -> None:
    """Look at each training of a class while its method runs."""
    owner = getattr(module, kind)
    original = getattr(owner, method)

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _armed(self):
            return original(self, *args, **kwargs)

    setattr(owner, method, run)


def _armed(trainer: Any) -> AbstractContextManager[Any]:
    """What the environment asks for, begun; or nothing, and why is logged."""
    try:
        run = monitoring(trainer, **options_of(os.environ))
        run.__enter__()
    except Exception as error:  # noqa: BLE001 (somebody's training: said, never raised)
        logger.warning("eagle-trace does not look at this training: %s", error)
        return nullcontext()
    return _Begun(run)


class _Begun(AbstractContextManager[Any]):
    """A context that was entered."""

    def __init__(self, run: Monitoring) -> None:
        self._run = run

    def __exit__(self, *how: Any) -> None:
        self._run.__exit__(*how)


def options_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `monitoring` from environment variables.

    Raises:
        UsageError: a number is none.
    """
    from eagle_trace.errors import UsageError

    given = {
        name: value for name in (*_PATHS, *_NUMBERS, *_WORDS) if (value := environment.get(f"{PREFIX}_{name.upper()}"))
    }
    options: dict[str, Any] = {"served": environment[PREFIX], **given}
    for name in _NUMBERS:
        if name in given:
            try:
                options[name] = int(given[name])
            except ValueError as error:
                raise UsageError(f"{PREFIX}_{name.upper()} must be a number, not {given[name]!r}") from error
    return options
