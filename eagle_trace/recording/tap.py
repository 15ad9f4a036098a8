"""Taps: where in a host's draft each site is found, as a table; `hang` hangs one into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from eagle_trace.capture import Shard
from eagle_trace.recording.hooks import Hooks

#: receives a site and the host's own tensor, which it must copy before it returns
Receive = Callable[[str, Any], None]


class Given(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first(output: Any) -> Any:
    """The output itself, or the first of several: parallel linears return (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


def argument(index: int = 0, name: str = "") -> Callable[[Given], Any]:
    """Picks the argument called `name`, or the one at `index`."""
    return lambda given: given.kwargs[name] if name in given.kwargs else given.args[index]


@dataclass(frozen=True)
class Tap:
    """One site and where it is found.

    Attributes:
        module: path of the module from the model on, as it stands in the host (``model.layers.0.mlp.act_fn``).
        when: ``after`` its forward, or ``before`` it.
        site: the site's name.
        pick: finds the tensor in the module's output, or in what it is given (`Given`).
        during: path of a module within whose forward alone it counts: layers may share what `module` names.
        shard: which part of the site's last axis this rank computes; None where every rank computes all of it.
    """

    module: str
    when: Literal["after", "before"]
    site: str
    pick: Callable[[Any], Any] = first
    during: str | None = None
    shard: Shard | None = None


def after(module: str, site: str, pick: Callable[[Any], Any] = first, **more: Any) -> Tap:
    """A tap behind a module."""
    return Tap(module, "after", site, pick, **more)


def before(module: str, site: str, index: int = 0, name: str = "", **more: Any) -> Tap:
    """A tap on an argument of a module."""
    return Tap(module, "before", site, argument(index, name), **more)


def find(model: Any, path: str) -> Any:
    """What the model has at a path, None if it has nothing there."""
    found = model
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
    return found


def is_module(thing: Any) -> bool:
    """Whether a hook can be hung there."""
    return hasattr(thing, "register_forward_hook")


def hang(hooks: Hooks, model: Any, taps: Iterable[Tap], receive: Receive) -> dict[str, str]:
    """Hang `receive` into every place of a table.

    Returns:
        The sites that the model has no place for, and what it lacks.
    """
    taps = list(taps)
    missing: dict[str, str] = {}
    places = [tap.during for tap in taps if tap.during is not None]
    running = places[:1]
    for place in dict.fromkeys(places):
        if is_module(module := find(model, place)):
            hooks.before(module, lambda *_, place=place: running.__setitem__(0, place))
    for tap in taps:
        if is_module(module := find(model, tap.module)):
            _hang_one(hooks, module, tap, running, receive)
        else:
            missing[tap.site] = tap.module
    return missing


def _hang_one(hooks: Hooks, module: Any, tap: Tap, running: list[str], receive: Receive) -> None:
    site, pick, during = tap.site, tap.pick, tap.during

    def passed(_module: Any, args: tuple[Any, ...], rest: Any) -> None:
        if during is None or running[0] == during:
            receive(site, pick(rest if tap.when == "after" else Given(args, rest)))

    (hooks.after if tap.when == "after" else hooks.before)(module, passed)
