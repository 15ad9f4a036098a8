"""What a recording was made of, so that one that is there already is taken for another's only if it is the same.

A folder's fingerprint reads every small file in full and of a large one blocks spread over it, with its size and time
of change: a checkpoint of 20 GB costs a few hundred megabytes of reading, not 20 GB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from eagle_trace.checkpoints import check_folder
from eagle_trace.errors import CheckpointError

#: files of a folder that a host reads; what else lies there (logs, optimiser states, READMEs) changes no recording
READ = (".json", ".jinja", ".model", ".txt", ".py", ".safetensors", ".bin", ".pt", ".tiktoken")
#: a file up to so many bytes is read in full; of a larger one, so many blocks of so many bytes
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 64 << 20, 32, 1 << 20
#: variables by which a host's behaviour is changed without a change of its command line
VARIABLES = ("SGLANG_", "VLLM_", "CUDA_", "PYTHONPATH", "HF_")


def of_folder(folder: Path) -> str:
    """Fingerprint of a checkpoint folder: 16 hexadecimal digits.

    Raises:
        CheckpointError: there is no such folder, or a file in it cannot be read.
    """
    check_folder(folder)
    known = xxhash.xxh3_64()
    try:
        for file in sorted(folder.rglob("*")):
            if file.suffix in READ and file.is_file():
                known.update(str(file.relative_to(folder)).encode())
                _add_file(known, file)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    return known.hexdigest()


def of_text(parts: Iterable[str]) -> str:
    """Fingerprint of some text: 16 hexadecimal digits."""
    known = xxhash.xxh3_64()
    for part in parts:
        known.update(part.encode("utf-8", "surrogateescape"))
        known.update(b"\0")
    return known.hexdigest()


def of_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Fingerprint of the variables that a host reads; their values may be secret, so nothing else is kept of them."""
    return of_text(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES))


def _add_file(known: xxhash.xxh3_64, file: Path) -> None:
    status = file.stat()
    known.update(status.st_size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if status.st_size <= WHOLE_BYTES:
            while piece := stream.read(BLOCK_BYTES):
                known.update(piece)
            return
        known.update(status.st_mtime_ns.to_bytes(8, "little", signed=True))
        for block in range(BLOCKS):
            stream.seek((status.st_size - BLOCK_BYTES) * block // (BLOCKS - 1))
            known.update(stream.read(BLOCK_BYTES))
