"""Checkpoint folders read without loading them: configs, headers of weight files, tensors in pieces.

Which files of a folder count is SGLang's rule (`DefaultModelLoader._prepare_weights`): safetensors if there are any,
else `.bin`, else `.pt`.

Tensors are read with plain reads into one small buffer, not memory-mapped: mapped pages count as the
process's memory
and would make a check of a large checkpoint look (and, under a memory limit, fail) as if it had loaded it.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.remote import is_remote
from eagle_trace_analysis.checkpoint.torchfile import read_torch_file

#: bytes of a tensor read at once
PIECE_BYTES = 8 << 20
#: the format's own limit on its JSON header
MAX_HEADER_BYTES = 100_000_000

#: safetensors' dtype names and numpy's; what is missing here (4- and 6-bit formats) is listed but never read
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}  # fmt: skip
#: SGLang reads the first of these that matches anything
PATTERNS = ("*.safetensors", "*.bin", "*.pt")
#: what else torch saves beside a model (`filter_files_not_needed_for_inference`)
NOT_WEIGHTS = ("*training_args.bin", "*optimizer.bin", "*optimizer.pt", "*scheduler.pt", "*scaler.pt")
#: the one index SGLang reads
INDEX = "model.safetensors.index.json"

#: names as configs spell them
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        name: as stored.
        dtype: safetensors' name of it (``BF16``); empty if only an index names the tensor.
        file: what it lies in; of a remote folder, what reads it (`remote.RemotePath`).
        start, nbytes: its place in `file`.
        strides: in elements; None where the elements lie in order, as safetensors always has them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_float(self) -> bool:
        """A dtype that `read` gives as numbers with a fraction."""
        return self.dtype in DTYPE_NAMES

    @property
    def remote(self) -> bool:
        """Whether reading costs a request."""
        return is_remote(self.file)

    def read(self) -> NDArray[Any]:
        """The whole tensor in its stored dtype. For small ones: use `pieces` or `rows` for matrices.

        Raises:
            CheckpointError: the dtype has no numpy form, or the file ends early.
        """
        if self.strides is not None:
            return self._gathered()
        return self._read(0, self.nbytes).reshape(self.shape)

    def rows(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
        """Some rows of a matrix [len(indices), columns], in the order asked for."""
        if self.strides is not None:
            picked: NDArray[Any] = self._gathered()[np.asarray(indices)]
            return picked
        width = self.nbytes // self.shape[0]
        if self.remote and len(indices) > 1 and np.all(np.diff(np.asarray(indices)) == 1):
            # neighbours are one request
            raw = self._read(int(indices[0]) * width, len(indices) * width)
            return raw.reshape(len(indices), *self.shape[1:])
        out = np.empty((len(indices), width), np.uint8)
        with _open(self.file) as file:
            for place, index in enumerate(indices):
                file.seek(self.start + int(index) * width)
                if file.readinto(out[place].data) != width:  # type: ignore[attr-defined]
                    raise CheckpointError(f"{self.file} ends inside the tensor {self.name}: the file is truncated")
        return out.view(self._numpy_dtype()).reshape(len(indices), *self.shape[1:])

    def pieces(self, elements: int | None = None) -> Iterator[NDArray[Any]]:
        """The tensor, flat, in pieces of at most `elements`; a piece is valid until the next is asked for."""
        dtype = self._numpy_dtype()
        step = (elements or PIECE_BYTES // dtype.itemsize) * dtype.itemsize
        if self.strides is not None:
            flat = self._gathered().reshape(-1)
            for start in range(0, self.size, step // dtype.itemsize):
                yield flat[start : start + step // dtype.itemsize]
            return
        buffer = np.empty(min(step, self.nbytes), np.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            left = self.nbytes
            while left:
                part = buffer[: min(step, left)]
                done = 0
                while done < len(part):
                    got = file.readinto(part[done:].data)
                    if not got:
                        raise CheckpointError(f"{self.file} ends inside the tensor {self.name}: the file is truncated")
                    done += got
                left -= len(part)
                yield part.view(dtype)

    def _gathered(self) -> NDArray[Any]:
        """A tensor whose elements do not lie in order (torch saves a transposed matrix so), whole and in order."""
        dtype, strides = self._numpy_dtype(), self.strides or ()
        span = 1 + sum((axis - 1) * stride for axis, stride in zip(self.shape, strides, strict=True))
        flat = self._read(0, span * dtype.itemsize)
        spread = np.lib.stride_tricks.as_strided(flat, self.shape, [stride * dtype.itemsize for stride in strides])
        return np.ascontiguousarray(spread)

    def _numpy_dtype(self) -> np.dtype[Any]:
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"the tensor {self.name} in {self.file} is stored as {self.dtype}, which this command cannot read"
            )
        return DTYPES[self.dtype]

    def _read(self, start: int, nbytes: int) -> NDArray[Any]:
        with _open(self.file) as file:
            file.seek(self.start + start)
            data = file.read(nbytes)
        if len(data) != nbytes:
            raise CheckpointError(f"{self.file} ends inside the tensor {self.name}: the file is truncated")
        return np.frombuffer(data, self._numpy_dtype())


def _open(file: Path) -> IO[bytes]:
    """A file of which single places are read: of a remote one, nothing beside them."""
    return file.open("rb", buffering=0) if is_remote(file) else file.open("rb")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and weights.

    Attributes:
        tensors: by stored name.
        unlisted: weight files that SGLang skips: not named by the index, or of a kind it only reads alone.
        repeated: names that more than one file holds; which one SGLang keeps is chance.
        metadata: what the headers say beside the tensors.
        index_only: the weights are not there, their index is; tensors have a name and nothing else.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    unlisted: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    index_only: bool = False

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def open_checkpoint(folder: Path, *, index_alone: bool = False) -> Checkpoint:
    """Config and headers of a checkpoint; no tensor is read.

    Args:
        folder: where it lies.
        index_alone: whether an index without its files will do.

    Raises:
        CheckpointError: something is missing or damaged; the message says what.
    """
    config = read_config(folder)
    if index_alone and not _present(folder)[0] and (folder / INDEX).is_file():
        names = _weight_map(folder / INDEX)
        empty = {name: StoredTensor(name, "", (), folder / file, 0, 0) for name, file in names.items()}
        return Checkpoint(folder, config, empty, index_only=True)
    files, unlisted = weight_files(folder)
    headers = [_header(file) for file in files]
    stored = [tensor for tensors, _ in headers for tensor in tensors]
    metadata = {key: value for _, said in headers for key, value in said.items()}
    if not stored:
        raise CheckpointError(f"{folder} holds no tensors")
    counts = Counter(tensor.name for tensor in stored)
    repeated = tuple(name for name, count in counts.items() if count > 1)
    return Checkpoint(folder, config, {tensor.name: tensor for tensor in stored}, unlisted, repeated, metadata)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds files that SGLang would take for weights."""
    return bool(_present(folder)[0])


def _present(folder: Path) -> tuple[list[Path], list[Path]]:
    """The weight files of the kind SGLang reads, and those of the kinds it then leaves."""
    # names that begin with a dot (macOS leaves some beside every file) are not matched in SGLang
    kinds = [sorted(file for file in folder.glob(pattern) if file.name[0] != ".") for pattern in PATTERNS]
    taken = next((kind for kind in kinds if kind), [])
    left = [file for kind in kinds if kind is not taken for file in kind]
    taken, left = (
        [file for file in some if not any(fnmatch.fnmatch(file.name, one) for one in NOT_WEIGHTS)]
        for some in (taken, left)
    )
    return taken, left


def weight_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files SGLang loads, and the names of those beside them that it skips.

    Raises:
        CheckpointError: there are none, or the index names one that is not there.
    """
    present, left = _present(folder)
    skipped = tuple(file.name for file in left)
    index = folder / INDEX
    if present and present[0].suffix != ".safetensors":
        return present, skipped
    if not index.is_file():
        if not present:
            raise CheckpointError(_no_weights(folder))
        if [file.name for file in present] == ["consolidated.safetensors", "model.safetensors"]:
            return present[1:], ("consolidated.safetensors", *skipped)
        return present, skipped
    listed = _listed(folder, index)
    return (
        [folder / name for name in listed],
        (*(file.name for file in present if file.name not in listed), *skipped),
    )


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index names it."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index of safetensors files: it needs a JSON object with weight_map"
        ) from error
    for name in found.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    return found


def _listed(folder: Path, index: Path) -> list[str]:
    listed = sorted(set(_weight_map(index).values()))
    for name in listed:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is incomplete: its index names {name}, which is not there")
    return listed


def _no_weights(folder: Path) -> str:
    other = sorted(file.name for pattern in ("*.gguf", "*.pth", "*.ckpt", "*.npz") for file in folder.glob(pattern))
    if any(name.endswith(".gguf") for name in other):
        return (
            f"{folder} holds its weights as GGUF ({other[0]}), which this command does not read: check the folder it "
            "was converted from"
        )
    found = f" (only {', '.join(other[:3])}, which SGLang does not load)" if other else ""
    return f"{folder} has no weights: SGLang loads *.safetensors, else *.bin, else *.pt{found}"


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one weight file, every offset checked against the file's size.

    Raises:
        CheckpointError: the file is truncated or not in the format its name says.
    """
    return _header(file)[0]


def _header(file: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of one weight file, and what its header says beside them."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is not a file")
    if file.suffix != ".safetensors":
        return [
            StoredTensor(one.name, one.dtype, one.shape, file, one.start, one.nbytes, one.strides)
            for one in read_torch_file(file)
        ], {}
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file} is truncated: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is no safetensors file: it claims a header of {length:,} bytes")
            if 8 + length > size:
                raise CheckpointError(
                    f"{file} is truncated: its header alone takes {8 + length:,} bytes, the file has {size:,}"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: its safetensors header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is damaged: its safetensors header is not a JSON object")
    said = header.pop("__metadata__", None) or {}
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise CheckpointError(f"{file} is damaged: the metadata of its safetensors header are not texts by name")
    found = [_stored(file, name, entry, 8 + length, size) for name, entry in header.items()]
    _refuse_holes(file, found, 8 + length, size)
    return found, said


def _refuse_holes(file: Path, tensors: Sequence[StoredTensor], base: int, size: int) -> None:
    """Refuse a file whose tensors do not fill it one behind the other: the safetensors library opens no other."""
    end = base
    for tensor in sorted(tensors, key=lambda one: (one.start, one.start + one.nbytes)):
        if tensor.start != end:
            how = "overlaps the tensor before it" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(f"{file} is damaged: {tensor.name!r} {how}, at byte {tensor.start:,}")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(f"{file} is damaged: {size - end:,} bytes follow behind its last tensor")


def _stored(file: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged: the header entry of {name!r} is not dtype, shape and data_offsets"
        ) from error
    if not whole or begin > end:
        raise CheckpointError(f"{file} is damaged: shape or offsets of {name!r} are not whole numbers in order")
    if base + end > size:
        raise CheckpointError(f"{file} is truncated: {name!r} ends at byte {base + end:,}, the file has {size:,}")
    elements = 1
    for axis in shape:
        elements *= axis
    if dtype in DTYPES and elements * DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(
            f"{file} is damaged: {name!r} holds {end - begin:,} bytes, not what {list(shape)} of {dtype} takes"
        )
    return StoredTensor(name, dtype, shape, file, base + begin, end - begin)


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers of any stored dtype as float32 (bfloat16 exactly, float64 rounded)."""
    if values.dtype == ml_dtypes.bfloat16:
        wide = values.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


def stored_dtype(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Name of the dtype most floating-point elements are stored in (``bfloat16``), None without any."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.is_float:
            name = DTYPE_NAMES[tensor.dtype]
            sizes[name] = sizes.get(name, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else None
