"""What is asked of a tensor of a host, through its own library: nothing here imports torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from eagle_trace.capture import Array


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
