"""A stand-in for a device: tensors that compute on the CPU, are said to lie elsewhere, and count what brings them back.

A copy into pinned memory arrives when somebody waits for its event, and not before. Whatever else makes the host's
thread wait for a device (`.cpu()`, `.item()`, a truth value, a mask as an index, ...) is counted as blocking, if the
recorder asked for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_trace import tensors

#: what cannot be answered without waiting for the device
BLOCKING = {
    "cpu", "numpy", "item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__", "__contains__",
    "nonzero", "unique", "equal", "is_nonzero", "masked_select", "allclose",
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor that is said to lie on a device; so is whatever is computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := _current[-1] if _current else None) is not None and _from_recorder():
            if func is torch.Tensor.copy_ and not isinstance(args[0], OnDevice):
                return device.carry(args[0], args[1], kwargs.get("non_blocking", False))
            masks = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool
            # what is said to be the device is a CPU to torch: only the name means the host
            away = func is torch.Tensor.to and any(isinstance(one, str) and one == "cpu" for one in args[1:])
            if func.__name__ in BLOCKING or masks or away:
                device.blocking.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


class _Pinnable(torch.Tensor):
    """A tensor of the host that goes to the device without anybody waiting for it."""

    def pin_memory(self, _device: Any = None) -> _Pinnable:
        return self

    def to(self, *_: Any, non_blocking: bool = False, **__: Any) -> Any:
        if not non_blocking:
            _current[-1].blocking.append("to the device")
        return self.as_subclass(torch.Tensor).clone().as_subclass(OnDevice)


_current: list[Device] = []


def _from_recorder() -> bool:
    """Whether the nearest caller that is not torch's own is the recorder."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch", __name__)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__", "").startswith("eagle_trace")


class _Event:
    def __init__(self, device: Device, **_: Any) -> None:
        self._device = device
        self._after: list[Callable[[], None]] = []

    def record(self, _stream: Any = None) -> None:
        self._after = list(self._device.under_way)

    def synchronize(self) -> None:
        for arrive in self._after:
            if arrive in self._device.under_way:
                self._device.under_way.remove(arrive)
                arrive()


class Device:
    """Counts what happens between a device and its host.

    Attributes:
        blocking: what made the recorder's host wait, by name.
        transfers: bytes of each copy into pinned memory.
        under_way: copies that have not arrived.
    """

    def __init__(self) -> None:
        self.blocking: list[str] = []
        self.transfers: list[int] = []
        self.under_way: list[Callable[[], None]] = []
        self._accelerator = SimpleNamespace(
            Event=lambda **options: _Event(self, **options),
            Stream=lambda _device: SimpleNamespace(wait_event=lambda _event: None),
            stream=lambda _stream: contextlib.nullcontext(),
            synchronize=lambda: None,
        )
        self._library = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("cat", "arange", "uint8", "int32")},
            from_numpy=lambda array: torch.from_numpy(array).as_subclass(_Pinnable),
            empty=lambda shape, dtype, **_: torch.full(shape, 255, dtype=dtype),
        )

    def carry(self, there: torch.Tensor, tensor: Any, non_blocking: bool) -> torch.Tensor:
        """Copy a tensor of the device into the host's memory."""
        if not non_blocking:
            self.blocking.append("copy_")
        self.transfers.append(tensor.numel() * tensor.element_size())
        now = tensor.as_subclass(torch.Tensor).clone()
        self.under_way.append(lambda: there.copy_(now))  # type: ignore[func-returns-value, arg-type, return-value]
        return there

    @contextlib.contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[Device]:
        """Let the recorder take `OnDevice` tensors for this device's."""
        library, accelerator = tensors.library_of, tensors.accelerator_of
        patch.setattr(OnDevice, "record_stream", lambda *_: None, raising=False)
        patch.setattr(tensors, "library_of", lambda one: self._library if here(one) else library(one))
        patch.setattr(tensors, "accelerator_of", lambda one: self._accelerator if here(one) else accelerator(one))
        _current.append(self)
        try:
            yield self
        finally:
            _current.remove(self)


def here(tensor: Any) -> bool:
    """Whether a tensor is said to lie on the device."""
    return isinstance(tensor, OnDevice)


def moved(thing: Any) -> Any:
    """Tensors, and those in mappings, as tensors of the device."""
    if isinstance(thing, dict):
        return {name: moved(one) for name, one in thing.items()}
    return thing.detach().clone().as_subclass(OnDevice) if isinstance(thing, torch.Tensor) else thing
