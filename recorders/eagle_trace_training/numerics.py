"""Dtypes, devices and threads of a draft that is run for a recording."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.utils import logging as hf_logging

from eagle_trace.errors import UsageError
from eagle_trace.recording.device import device_for

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
ROWS = 512
ATTENTION_BYTES = 1 << 30
ONE_THREAD_BELOW = 1024


class _Float64(TorchFunctionMode):
    """Keeps a float64 forward in float64 where the model's code asks for float32 (norms, softmax, rope)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """No gradients; and if `dtype` is float64, no detour through float32 either."""
    with torch.inference_mode():
        if dtype == "float64":
            with _Float64():
                yield
        else:
            yield


@contextmanager
def threads_for(device: str, hidden_size: int) -> Iterator[None]:
    """One thread for small models on a CPU, as many as torch likes for others.

    Threads that wait for each other after every small operation lose more than they win: on a busy machine of
    two cores, a draft of hidden size 128 took more than ten times as long on two threads as on one.
    """
    threads = torch.get_num_threads()
    if device == "cpu" and hidden_size < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def row_budget(heads: int, steps: int, element_bytes: int) -> int:
    """Rows a forward may have: its attention weights, [heads, T, steps * T] a few times over, must fit the
    memory.

    Small packs are also the fast ones: eager attention computes every pair of documents, to mask it away.
    """
    # scores, scores with the mask, softmax in float32 and its result are alive together
    each = 4 * max(4, element_bytes) * heads * steps
    return max(1, min(ROWS, int((ATTENTION_BYTES / each) ** 0.5)))


def raise_dtype(model: Any, dtype: str) -> Any:
    """Widen the parameters of `model` in place; buffers (rotary frequencies) stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def rounded_tables(exact: Any, cos: Any) -> str:
    """What of a rotary table was rounded to bfloat16 before it was computed, as `Rope.rounded` has it in the analysis.

    A model in bfloat16 has rounded frequencies, but the table that was built before; the first sequence that it is too
    short for has it built anew, from them.

    Args:
        exact: the frequencies that the config asks for, float32 [n].
        cos: the table, [..., rows, size].
    """
    exact = exact.to(cos.device)
    rounded, rows = exact.bfloat16(), cos.shape[-2]
    place = torch.arange(rows, device=cos.device)
    angles = {
        "": place.float()[:, None] * exact,
        "frequencies": place.float()[:, None] * rounded.float(),
        "angles": (place.bfloat16()[:, None] * rounded).float(),
    }
    table = cos.detach().float().reshape(rows, -1)[:, : len(exact)]
    error = {name: float((table - angle.cos()).square().sum()) for name, angle in angles.items()}
    best = min(error, key=error.__getitem__)
    # where too few rows tell them apart, nothing is rounded
    return best if error[best] < error[""] / 4 else ""


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for ``auto``; raises HostError for CUDA that is not there, UsageError for other devices."""
    return device_for(device, torch.cuda.is_available)


def check_dtype(dtype: str) -> str:
    """`dtype` if a draft is served in it; raises UsageError for another one."""
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"--dtype must be auto, float32, float16 or bfloat16, not {dtype!r}")
    return dtype


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or load reports: what matters of them is in the trace."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
