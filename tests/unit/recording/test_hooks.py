"""Hooks come off whole, whoever takes them off."""

from __future__ import annotations

import threading

import pytest

from eagle_trace.recording.hooks import Hooks


class Runner:
    """Something of a host that is wrapped."""

    def propose(self) -> int:
        return 1


def test_two_threads_that_take_hooks_off_take_them_off_in_their_order() -> None:
    runner, hooks, undone, others = Runner(), Hooks(), [], []
    hooks.on_removal(lambda: undone.append("first"))
    hooks.wrap(runner, "propose", lambda *_: None)

    def slow() -> None:
        other = threading.Thread(target=hooks.remove)
        other.start()
        # it cannot get on before this one is done, however long that takes
        other.join(0.2)
        others.append(other)
        undone.append("last")

    hooks.on_removal(slow)
    hooks.wrap(runner, "propose", lambda *_: None)
    hooks.remove()
    others[0].join()
    assert undone == ["last", "first"]
    assert "propose" not in vars(runner)


def test_one_hook_that_cannot_be_taken_off_keeps_no_other_on() -> None:
    runner, hooks = Runner(), Hooks()
    hooks.wrap(runner, "propose", lambda *_: None)
    hooks.on_removal(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hooks.remove()
    assert "propose" not in vars(runner)
    hooks.remove()
