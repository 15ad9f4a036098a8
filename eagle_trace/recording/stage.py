"""What a forward shows, on its way out of a device: copied where it is, brought together, and carried over at once.

A tensor is copied as it is computed, since fused kernels overwrite their inputs. On a device the copy stays there until
`send`: then one non-blocking copy takes all of them into pinned memory, on a stream of its own, behind an event, and
the thread that writes the trace waits for it to arrive. The host's thread waits for nothing. In the host's memory there
is nothing to carry: a copy is an array at once.

Nothing here imports torch: see `eagle_trace.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_trace import tensors
from eagle_trace.capture import DTYPES, Array
from eagle_trace.streams import Part

#: made of what was kept, once it is there; may give parts of the trace
Task = Callable[[], Iterable[Part] | None]

#: what lies on a device at most before it begins to leave; a forward of fewer bytes leaves in one piece
TRANSFER_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Held:
    """One tensor that was kept.

    Attributes:
        here: it as an array, None as long as it lies on a device.
        tensor: it on its device, None once it is here or on its way.
        nbytes: what it takes.
    """

    here: Array | None
    tensor: Any
    nbytes: int

    @property
    def array(self) -> Array:
        """The tensor as a contiguous array of the same dtype, of its own memory; once it has arrived."""
        if self.here is None:
            raise RuntimeError("what was kept of a forward is read before it was sent")
        return self.here


class _Transfer:
    """Some tensors of one device on their way into pinned memory, in one copy."""

    def __init__(self, held: list[Held]) -> None:
        # the widest elements first, so that each begins at a multiple of its own size
        self._held = sorted(held, key=lambda one: -one.tensor.element_size())
        self._kinds = [(one.tensor.shape, _numpy_dtype(one.tensor)) for one in self._held]
        first = self._held[0].tensor
        library, accelerator = tensors.library_of(first), tensors.accelerator_of(first)
        together = library.cat([one.tensor.reshape(-1).view(library.uint8) for one in self._held])
        for one in self._held:
            one.tensor = None
        computed = accelerator.Event()
        computed.record()
        stream = _stream_of(accelerator, together.device)
        stream.wait_event(computed)
        with accelerator.stream(stream):
            self._there = library.empty(together.shape, dtype=library.uint8, pin_memory=True)
            self._there.copy_(together, non_blocking=True)
            # a thread that waits for it sleeps
            self._arrived = accelerator.Event(blocking=True)
            self._arrived.record()
        # its memory is not given to others before it is read
        together.record_stream(stream)

    def finish(self) -> None:
        """Wait until it has arrived. For the thread that writes, not for the host's."""
        self._arrived.synchronize()
        data: Array = self._there.numpy()
        start = 0
        for held, (shape, dtype) in zip(self._held, self._kinds, strict=True):
            # copied: pinned memory is scarce, and a row may wait for its row group
            array = data[start : start + held.nbytes].copy().view(dtype).reshape(tuple(shape))
            start += held.nbytes
            held.here = array
        del self._there


_streams: dict[str, Any] = {}


def _stream_of(accelerator: Any, device: Any) -> Any:
    """The stream by which everything recorded leaves a device."""
    if str(device) not in _streams:
        _streams[str(device)] = accelerator.Stream(device)
    return _streams[str(device)]


def _numpy_dtype(tensor: Any) -> np.dtype[Any]:
    name = tensors.dtype_of(tensor)
    return DTYPES[name] if name in DTYPES else np.dtype(name)


class Load:
    """What was sent together: arrays once it has arrived, and what is made of them."""

    def __init__(self) -> None:
        #: bytes that are kept for it, on the device or here
        self.nbytes = 0
        self._waiting: list[Held] = []
        self._waiting_bytes = 0
        self._transfers: list[_Transfer] = []
        self._tasks: list[Task] = []

    def add(self, held: Held) -> None:
        """Take what was kept along."""
        self.nbytes += held.nbytes
        if held.tensor is None:
            return
        self._waiting.append(held)
        self._waiting_bytes += held.nbytes
        if self._waiting_bytes >= TRANSFER_BYTES:
            self.leave()

    def then(self, task: Task) -> None:
        """Do `task` once everything has arrived, after those before it."""
        self._tasks.append(task)

    def leave(self, *, settle: bool = False) -> None:
        """Begin to bring what is still on a device over."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        by_device: dict[str, list[Held]] = {}
        for held in waiting:
            by_device.setdefault(str(held.tensor.device), []).append(held)
        for together in by_device.values():
            if settle:
                tensors.accelerator_of(together[0].tensor).synchronize()
            self._transfers.append(_Transfer(together))

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self._tasks or self.nbytes)

    def parts(self) -> Iterator[Part]:
        """Everything that goes into the trace, in order; waits for the device. Once, by the thread that writes."""
        for transfer in self._transfers:
            transfer.finish()
        self._transfers.clear()
        for task in self._tasks:
            yield from task() or ()


class Stage:
    """Takes what the forwards of one recording show, and sends it forward by forward.

    Attributes:
        late: whether anything came from a device: then nothing is known of what was kept until it has arrived.
    """

    def __init__(self) -> None:
        self.late = False
        self._load = Load()

    def copy(self, tensor: Any, *, fresh: bool = False) -> Held:
        """A copy of a tensor, made now; `fresh` if the tensor is nobody else's, so that none is needed."""
        if tensors.accelerator_of(tensor) is None:
            array = tensors.seen(tensor)
            array = np.ascontiguousarray(array) if fresh else array.copy()
            return Held(array, None, array.nbytes)
        self.late = True
        tensor = tensor.detach()
        mine = tensor.contiguous() if fresh else tensor.new_empty(tensor.shape).copy_(tensor)
        return Held(None, mine, mine.numel() * mine.element_size())

    def keep(self, tensor: Any, *, fresh: bool = False) -> Held:
        """Copy a tensor and send it with the forward that comes next, or is going on."""
        if tensors.accelerator_of(tensor) is None and not fresh:
            # by numpy: torch's own operators cost several times as much to call, and rows here are few and short
            array = tensors.seen(tensor).copy()
            held = Held(array, None, array.nbytes)
        else:
            held = self.copy(tensor, fresh=fresh)
        self._load.add(held)
        return held

    def keep_rows(self, tensor: Any, index: Array, beside: Callable[[], Any]) -> Held:
        """`keep` the rows of a tensor [T, ...] at `index`, which `beside` gives as a tensor of its device."""
        if tensors.accelerator_of(tensor) is not None:
            return self.keep(tensor.index_select(0, beside()), fresh=True)
        array = tensors.seen(tensor)[index]
        held = Held(array, None, array.nbytes)
        self._load.add(held)
        return held

    def add(self, held: Held) -> None:
        """Send what `copy` gave with the forward that comes next, or is going on."""
        self._load.add(held)

    def then(self, task: Task) -> None:
        """Do `task` as soon as everything kept so far is known: at once, or in the thread that writes; in order."""
        if self.late:
            self._load.then(task)
            return
        for part in task() or ():
            self._load.then(lambda part=part: (part,))  # type: ignore[misc]

    def later(self, task: Task) -> None:
        """Do `task` in the thread that writes, after all before it."""
        self._load.then(task)

    def send(self, *, settle: bool = False) -> Load:
        """Begin to bring over what was kept since the last time; the host's thread goes on at once.

        Args:
            settle: wait for the device first, since another thread asked it to copy.
        """
        load, self._load = self._load, Load()
        load.leave(settle=settle)
        return load
