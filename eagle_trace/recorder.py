"""What both recorders share: hooks that leave no trace in the host, and tensors that become arrays.

Nothing here imports torch: modules and tensors are used through their own methods.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from eagle_trace.capture import Array, Shard, to_float32
from eagle_trace.sketch import Reduced, reduce_tensor


def to_array(tensor: Any, *, copy: bool = True) -> Array:
    """A torch tensor on any device as a contiguous numpy array of the same dtype, a private copy unless told otherwise.

    The copy is made at once: fused kernels overwrite their inputs in place, so a reference would change later.
    """
    host = tensor.detach().to("cpu", copy=copy).contiguous()
    if str(host.dtype) == "torch.bfloat16":
        # numpy has no bfloat16 of its own: pass the bits through int16 (its dtype taken from a tensor, not from torch)
        return host.view(host.new_empty(0).short().dtype).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]


def parameter_row(
    name: str,
    canonical_name: str,
    tensor: Any,
    *,
    in_checkpoint: bool | None,
    shard: Shard | None = None,
    shard_axis: int = 0,
) -> dict[str, Any]:
    """A row of params.parquet for a parameter as the host holds it (torch tensor or numpy array, any device).

    The digest is BLAKE2b of the exact bytes, so equal parameters have equal digests on both sides. `shard` says which
    part of the parameter along `shard_axis` a rank holds, if not all of it: shape, digest and norm are then the part's.
    """
    array = np.ascontiguousarray(tensor if isinstance(tensor, np.ndarray) else to_array(tensor, copy=False))
    norm, nonfinite = _norm(array.reshape(-1))
    return {
        "name": name,
        "canonical_name": canonical_name,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "digest": hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=8).hexdigest(),
        "norm": norm,
        "nonfinite": nonfinite,
        "in_checkpoint": in_checkpoint,
        "shard_axis": None if shard is None else shard_axis,
        "shard_index": None if shard is None else shard.index,
        "shard_count": None if shard is None else shard.count,
    }


def _norm(flat: Array, block: int = 1 << 16) -> tuple[float, int]:
    """Norm over the finite elements, summed in float64 over blocks, and the count of the others."""
    square, nonfinite = 0.0, 0
    for start in range(0, len(flat), block):
        x = flat[start : start + block]
        wide = x.astype(np.float64) if x.dtype.kind in "iub" else to_float32(x).astype(np.float64)
        # einsum, not a dot product: that wakes BLAS's threads, which then spin on the host's cores
        part = float(np.einsum("i,i->", wide, wide))
        if not np.isfinite(part):
            finite = np.isfinite(wide)
            nonfinite += int((~finite).sum())
            part = float(np.einsum("i,i->", wide[finite], wide[finite]))
        square += part
    return float(np.sqrt(square)), nonfinite


def to_rows(tensor: Any) -> Array:
    """`to_array` with every axis but the last one folded into rows: [T, W]."""
    array = to_array(tensor)
    return array.reshape(-1, array.shape[-1]) if array.ndim != 2 else array


def capture_rows(tensor: Any, level: str, shard: Shard | None = None) -> Array | Reduced:
    """What the writer takes of a tensor at `level`: on a device, rows are reduced there where no values are kept.

    On the host's own processor they are copied as they are (`to_rows`), and the writer's thread reduces them.
    """
    if level in ("stats", "sketch") and tensor.device.type != "cpu":
        return reduce_tensor(tensor, sketched=level == "sketch", shard=shard)
    return to_rows(tensor)


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
            else:
                delattr(owner, name)

        setattr(owner, name, value)
        self._undo.append(restore)

    def wrap(self, owner: Any, name: str, observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `observe(result, args, kwargs)` after each call of the function ``owner.name``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            observe(result, args, kwargs)
            return result

        self.replace(owner, name, wrapper)

    def on_removal(self, undo: Callable[[], None]) -> None:
        """Call `undo` when everything is taken off."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off, last hung first."""
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()


def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis in float32 [T, V]."""
    x = logits.astype(np.float32)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def best_ids(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """The `count` best ids of each row, best first, ties by the lower id: ids, logits, log-probabilities [T, K]."""
    x = logits.astype(np.float32)
    count = min(count, x.shape[-1])
    rows = np.arange(len(x))[:, None]
    # partition first: a full sort of a 32,000-wide row costs more than the rest of the capture
    some = np.sort(np.argpartition(-x, count - 1, axis=-1)[:, :count], axis=-1)
    order = some[rows, np.argsort(-x[rows, some], axis=-1, kind="stable")]
    return order, x[rows, order], log_softmax(x)[rows, order]
