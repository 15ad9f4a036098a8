"""Hooks that leave no trace in the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Hooks:
    """Everything that was hung into a host, so that all of it comes off again.

    A context manager: on leaving, module hooks are removed and replaced attributes restored, also after an error.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def after(self, module: Any, function: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        """Call `function(module, args, output)` after each forward of `module`; it cannot change the output."""

        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            function(module, args, output)

        self._undo.append(module.register_forward_hook(hook).remove)

    def before(self, module: Any, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `function(module, args, kwargs)` before each forward of `module`; it cannot change the input."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            function(module, args, kwargs)

        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

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
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            observe(result, args, kwargs)
            return result

        self.replace(owner, name, wrapper)

    def precede(self, owner: Any, name: str, observe: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `observe(args, kwargs)` before each call of the function ``owner.name``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            observe(args, kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, wrapper)

    def on_removal(self, undo: Callable[[], None]) -> None:
        """Call `undo` when everything is taken off."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off, last hung first; an interrupt, or one that fails, keeps none of the others on."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except BaseException:
                self.remove()
                raise
