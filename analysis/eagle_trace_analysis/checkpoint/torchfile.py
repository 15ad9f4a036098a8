"""Weights as `torch.save` writes them (`.bin`, `.pt`): where each tensor lies, without torch and running nothing.

Both of torch's layouts are a pickle that names storages, and the storages' raw bytes: a zip archive (torch >= 1.6,
https://github.com/pytorch/pytorch/blob/main/torch/serialization.py), or one stream after the other (before). The
pickle is read with a table of the few names a state dict needs, as `torch.load(weights_only=True)`, by which SGLang
reads it, does; a file that needs another name is refused. Storages are not read here.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from eagle_trace.errors import CheckpointError

#: no state dict needs a pickle of more than this; the numbers lie outside of it
MAX_PICKLE_BYTES = 100_000_000
#: what a damaged file may raise in zipfile and in pickle
DAMAGED = (
    zipfile.BadZipFile, pickle.UnpicklingError, EOFError, ArithmeticError, LookupError, TypeError, ValueError,
    AttributeError, ImportError, RecursionError, MemoryError, NotImplementedError, struct.error,
)  # fmt: skip
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

#: torch's dtype: safetensors' name and the bytes of an element
TORCH_DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip


class Placed(NamedTuple):
    """A tensor and where it lies.

    Attributes:
        dtype: safetensors' name.
        start: byte in the file; of a tensor with strides its first element's.
        strides: in elements, None if the elements lie in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    strides: tuple[int, ...] | None


class _Storage(NamedTuple):
    key: str
    dtype: str
    elements: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Name(NamedTuple):
    """A dtype or a storage class, which the pickle names."""

    dtype: str


class _Call:
    """A function the pickle may call, in a shell on which a pickle cannot set anything that outlives it."""

    __slots__ = ("_do",)

    def __init__(self, do: Callable[..., Any]) -> None:
        self._do = do

    def __call__(self, *arguments: Any) -> Any:
        return self._do(*arguments)


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Tensor:
    # torch._utils._rebuild_tensor(_v2), and _v3, which adds the dtype of an untyped storage
    dtype = next((one.dtype for one in rest if isinstance(one, _Name)), storage.dtype)
    return _Tensor(storage, offset, tuple(size), tuple(stride), dtype)


class _RefusedError(CheckpointError):
    """The pickle needs what no state dict does."""


class _Reader(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], file: Path) -> None:
        super().__init__(stream)
        self.storages: dict[str, _Storage] = {}
        self._file = file
        self._calls: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): _Call(lambda size=(): tuple(size)),
            ("torch", "device"): _Call(lambda *_: None),
            ("torch._utils", "_rebuild_parameter"): _Call(lambda data, *_: data),
            ("torch._tensor", "_rebuild_from_type_v2"): _Call(lambda make, _, arguments, __: make(*arguments)),
            ("torch.nn.parameter", "Parameter"): _Name("parameter"),
            ("torch", "Tensor"): _Name("tensor"),
        }
        self._calls |= {("torch._utils", f"_rebuild_tensor{v}"): _Call(_rebuilt) for v in ("", "_v2", "_v3")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._calls:
            return self._calls[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _Name(STORAGES[name])
        if module == "torch" and name in TORCH_DTYPES:
            return _Name(name)
        raise _RefusedError(
            f"{self._file} needs {module}.{name} to be unpickled, which no file of plain weights does: it was not "
            "read; save the weights alone with safetensors.torch.save_file"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, named, key, _, elements = pid[:5]
        if kind != "storage" or (len(pid) > 5 and pid[5] is not None):
            raise pickle.UnpicklingError("not a storage")
        return self.storages.setdefault(str(key), _Storage(str(key), named.dtype, int(elements)))


def read_torch_file(file: Path, inside: str = "") -> list[Placed]:
    """The tensors of one `.bin` or `.pt` file, every place checked against the file's size.

    Args:
        file: what torch.save wrote.
        inside: the key of the state dict in it; empty where it is the state dict itself.

    Raises:
        CheckpointError: not a file of torch's, damaged, needing code to be read, or holding no tensor by name.
    """
    try:
        with file.open("rb") as stream:
            state, places = _zip(stream, file) if zipfile.is_zipfile(stream) else _legacy(stream, file)
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror})") from error
    except CheckpointError:
        raise
    except DAMAGED as error:
        raise CheckpointError(
            f"{file} is damaged, or is not a file that torch.save wrote ({type(error).__name__})"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} holds no weights by name: save the model's state_dict()")
    if inside:
        state = state.get(inside)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{file} holds no {inside}: it is not a checkpoint of that trainer")
    found = [_place(file, str(name), one, places) for name, one in state.items() if isinstance(one, _Tensor)]
    if not found:
        keys = ", ".join(repr(str(key)) for key in list(state)[:4])
        raise CheckpointError(
            f"{file} holds no tensors at its top level (its keys: {keys or 'none'}), and SGLang looks no deeper: "
            "save the model's state_dict() alone"
        )
    return found


def _zip(stream: IO[bytes], file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The unpickled object, and start and bytes of every storage."""
    archive = zipfile.ZipFile(stream)
    names = {one.filename: one for one in archive.infolist()}
    pickled = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise zipfile.BadZipFile("no data.pkl")
    root = pickled[0].removesuffix("data.pkl")
    order = names.get(f"{root}byteorder")
    if names[pickled[0]].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{file} is not a file of weights: its pickle takes {names[pickled[0]].file_size:,} bytes"
        )
    if order is not None and order.file_size < 16 and archive.read(order) != b"little":
        raise CheckpointError(f"{file} was saved on a big-endian machine, which this command does not read")
    with archive.open(names[pickled[0]]) as data:
        reader = _Reader(data, file)
        state = reader.load()
    places = {}
    for key in reader.storages:
        entry = names[f"{root}data/{key}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{file} is a compressed archive, which torch does not write: save it again")
        stream.seek(entry.header_offset)
        header = stream.read(30)
        name_length, extra_length = struct.unpack("<26xHH", header)
        places[key] = (entry.header_offset + 30 + name_length + extra_length, entry.file_size)
    return state, _inside(file, places)


def _legacy(stream: IO[bytes], file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    stream.seek(0)
    if _Reader(stream, file).load() != LEGACY_MAGIC:
        raise pickle.UnpicklingError("no magic number")
    _Reader(stream, file).load()  # the protocol's version
    system = _Reader(stream, file).load()
    if not system.get("little_endian", True):
        raise CheckpointError(f"{file} was saved on a big-endian machine, which this command does not read")
    reader = _Reader(stream, file)
    state = reader.load()
    places = {}
    for key in _Reader(stream, file).load():
        (elements,) = struct.unpack("<q", stream.read(8))
        nbytes = elements * TORCH_DTYPES[reader.storages[str(key)].dtype][1]
        places[str(key)] = (stream.tell(), nbytes)
        if nbytes < 0:
            raise pickle.UnpicklingError("negative size")
        stream.seek(nbytes, 1)
    return state, _inside(file, places)


def _inside(file: Path, places: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    size = file.stat().st_size
    for start, nbytes in places.values():
        if start + nbytes > size:
            raise CheckpointError(
                f"{file} is truncated: a tensor ends at byte {start + nbytes:,}, the file has {size:,}"
            )
    return places


def _place(file: Path, name: str, tensor: _Tensor, places: Mapping[str, tuple[int, int]]) -> Placed:
    dtype, width = TORCH_DTYPES[tensor.dtype]
    start, available = places[tensor.storage.key]
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if any(type(n) is not int or n < 0 for n in numbers) or len(tensor.shape) != len(tensor.strides):
        raise CheckpointError(f"{file} is damaged: shape or strides of {name!r} are not whole numbers")
    elements, ordered = 1, True
    for axis, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        ordered = ordered and (axis == 1 or stride == elements)
        elements *= axis
    ordered = ordered or not elements
    last = (
        sum((axis - 1) * stride for axis, stride in zip(tensor.shape, tensor.strides, strict=True)) if elements else -1
    )
    if (tensor.offset + last + 1) * width > available or elements * width > available:
        raise CheckpointError(f"{file} is damaged: {name!r} reaches beyond what is stored of it")
    return Placed(name, dtype, tensor.shape, start + tensor.offset * width, elements * width,
                  None if ordered else tensor.strides)  # fmt: skip
