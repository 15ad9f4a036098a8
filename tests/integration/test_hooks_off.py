"""The recorder as a guest: its hooks come off, and its own failure stays its own."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")


def test_hooks_come_off_also_after_an_error() -> None:
    from eagle_trace.recording.hooks import Hooks

    module = torch.nn.Linear(2, 2)
    seen: list[Any] = []

    class Owner:
        @staticmethod
        def function(x: int) -> int:
            return x + 1

    original = Owner.function
    with pytest.raises(RuntimeError), Hooks() as hooks:  # noqa: PT012 (the error must come while all are hung)
        hooks.after(module, lambda _module, _args, output: seen.append(output))
        hooks.before(module, lambda _module, args, _kwargs: seen.append(args))
        hooks.wrap(Owner, "function", lambda result, args, _kwargs: seen.append((result, args)))
        module(torch.ones(1, 2))
        assert Owner.function(1) == 2
        raise RuntimeError
    assert len(seen) == 3
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert Owner.function is original


def test_a_copy_does_not_change_when_the_host_writes_in_place() -> None:
    from eagle_trace.recording.arrays import to_array

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.ones(3, 4, dtype=dtype)
        array = to_array(tensor)
        tensor.zero_()
        assert (array.astype("float32") == 1).all()
        assert array.dtype.name == str(dtype).removeprefix("torch.")
