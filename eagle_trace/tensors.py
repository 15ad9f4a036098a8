"""What is asked of a tensor of a host, through its own library: nothing here imports torch."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from eagle_trace.capture import Array

_names: dict[Any, str] = {}


def library_of(tensor: Any) -> Any:
    """The library that a tensor comes from (torch)."""
    return sys.modules[type(tensor.device).__module__]


def accelerator_of(tensor: Any) -> Any:
    """What the tensor's library offers for its device (``torch.cuda``); None if the tensor is in the host's memory."""
    return None if tensor.device.type == "cpu" else library_of(tensor).get_device_module(tensor.device)


def beside(array: Array, tensor: Any) -> Any:
    """An array as a tensor of the device of `tensor`; nothing waits for it to get there."""
    given = library_of(tensor).from_numpy(np.ascontiguousarray(array))
    return given if accelerator_of(tensor) is None else given.pin_memory().to(tensor.device, non_blocking=True)


def dtype_of(tensor: Any) -> str:
    """On-disk name of a tensor's dtype."""
    dtype = tensor.dtype
    if dtype not in _names:
        _names[dtype] = str(dtype).removeprefix("torch.")
    return _names[dtype]


def seen(tensor: Any) -> Array:
    """A tensor in the host's memory as an array that shares its memory."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if dtype_of(tensor) == "bfloat16":
        # numpy has no bfloat16 of its own: pass the bits through int16
        array: Array = tensor.view(library_of(tensor).int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return tensor.numpy()  # type: ignore[no-any-return]
