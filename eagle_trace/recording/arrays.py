"""Tensors of a host as arrays, through their own methods: nothing here imports torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from eagle_trace.capture import Array


def to_array(tensor: Any, *, copy: bool = True) -> Array:
    """A torch tensor on any device as a contiguous numpy array of the same dtype, a private copy unless told otherwise.

    The copy is made at once: fused kernels overwrite their inputs in place, so a reference would change later.
    """
    host = tensor.detach().to("cpu", copy=copy).contiguous()
    if str(host.dtype) == "torch.bfloat16":
        # numpy has no bfloat16 of its own: pass the bits through int16 (its dtype taken from a tensor, not from torch)
        return host.view(host.new_empty(0).short().dtype).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]
