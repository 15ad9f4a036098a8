"""Hooks that leave no trace in the host."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

#: makes of a function that is to be hung what is hung: it returns nothing, so that it changes nothing in the host
Guard = Callable[[Callable[..., None]], Callable[..., None]]


def unguarded(function: Callable[..., None]) -> Callable[..., None]:
    """The guard of hooks whose errors may reach the host."""

    def hook(*args: Any) -> None:
        function(*args)

    return hook


class Hooks:
    """Everything that was hung into a host, so that all of it comes off again.

    A context manager: on leaving, module hooks are removed and replaced attributes restored, also after an error.

    Args:
        guard: every function that is hung goes through it, such that its errors do not reach the host.
    """

    def __init__(self, guard: Guard = unguarded) -> None:
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        # a host's thread and the one that takes orders may both take off; wrappers of one name come off in their order
        self._removing = threading.RLock()

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def after(self, module: Any, function: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        """Call `function(module, args, output)` after each forward of `module`; it cannot change the output."""
        self._undo.append(module.register_forward_hook(self._guard(function)).remove)

    def before(self, module: Any, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `function(module, args, kwargs)` before each forward of `module`; it cannot change the input."""
        self._undo.append(module.register_forward_pre_hook(self._guard(function), with_kwargs=True).remove)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Make ``owner.name`` be `value`, until it is put back."""
        original = getattr(owner, name)
        had_own = name in vars(owner)

        def restore() -> None:
            if had_own:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)

        # before it is replaced: an interrupt may come in between
        self._undo.append(restore)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `observe(result, args, kwargs)` after each call of the function ``owner.name``."""
        original, observe = getattr(owner, name), self._guard(observe)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            observe(result, args, kwargs)
            return result

        self.replace(owner, name, wrapped)

    def precede(self, owner: Any, name: str, observe: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `observe(args, kwargs)` before each call of the function ``owner.name``."""
        original, observe = getattr(owner, name), self._guard(observe)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            observe(args, kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, wrapped)

    def on_removal(self, undo: Callable[[], None]) -> None:
        """Call `undo` when everything is taken off."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off, last hung first; an interrupt, or one that fails, keeps none of the others on."""
        with self._removing:
            while self._undo:
                undo = self._undo.pop()
                try:
                    undo()
                except BaseException:
                    self.remove()
                    raise
