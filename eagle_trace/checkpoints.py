"""What both sides and the analysis read of a checkpoint folder: its config, and how to name it in a manifest."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError


def check_folder(folder: Path) -> None:
    """Raises CheckpointError where there is no such folder."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: give the folder of a checkpoint")
    if not folder.is_dir():
        hub = f" (of one on a hub: hf://{folder})" if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) else ""
        raise CheckpointError(f"there is no folder {folder}: give the folder of a checkpoint{hub}")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    check_folder(folder)
    path = folder / "config.json"
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the folder of a checkpoint")
    try:
        config = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: give the folder of a checkpoint ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to be a config") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return config


def parsed(text: str) -> Any:
    """A JSON text whose every number a float can hold, so that whoever reckons with one need not fear for its size.

    A whole number beyond that is infinite, as JSON's 1e400 is: it enters no computation, and is told like any other.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    return json.loads(text, parse_int=_whole)


def _whole(digits: str) -> int | float:
    near = float(digits)
    return int(digits) if math.isfinite(near) else near


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that describes its language model: the config itself, or one it holds.

    The keys and their order are SGLang's (`get_hf_text_config`).
    """
    for key in ("thinker_config", "llm_config", "language_config", "text_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config(inner) if key == "thinker_config" else inner
    return config


def class_names(config: Mapping[str, Any]) -> list[str]:
    """The classes that a config names (`architectures`), in its order; none where that is not a list."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def differ_by_padding(one: int, other: int) -> bool:
    """Whether two vocabulary sizes may be those of one tokenizer, padded differently (151,669 and 151,936)."""
    return abs(one - other) <= 0.02 * max(one, other) or -(-one // 64) == -(-other // 64)


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config's content, the same for the same content on both sides: 16 hex digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def checkpoint_facts(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Path, config and config digest of a checkpoint, as a manifest holds them."""
    return {"path": str(folder.resolve()), "config_digest": config_digest(config), "config": dict(config)}


# ---- a sample of the weights, so that two folders can be told apart without reading them ---------------------------

#: of each tensor, the bytes read at each of some places spread over it; and tensors sampled at most
BLOCK, PLACES, MOST_TENSORS = 512, 4, 1024
#: what a safetensors header may take (the format's own limit)
_MOST_HEADER = 100_000_000


def sampled_tensors(folder: Path, seconds: float = 0.2) -> dict[str, str]:
    """A checksum of a sample of each tensor, by stored name: ``BF16 1a2b3c4d`` (dtype, CRC-32 of `PLACES` blocks).

    Two targets of which any differs are two targets; equal samples do not prove that they are one. Of a model's many
    experts, the first of each layer is sampled. The caller waits `seconds` at most, whatever the disk does, and is
    given what was read by then.

    Args:
        folder: a checkpoint folder.
        seconds: to wait.
    """
    found: dict[str, str] = {}
    given_up = threading.Event()

    def read() -> None:
        try:
            for name, dtype, checksum in _samples(folder):
                if given_up.is_set():
                    return
                found[name] = f"{dtype} {checksum:08x}"
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            # a folder that cannot be sampled has no sample; whoever opens it for its weights says why
            return

    reader = threading.Thread(target=read, name="eagle-trace-sample", daemon=True)
    reader.start()
    reader.join(seconds)
    given_up.set()
    return dict(found)


def _samples(folder: Path) -> Iterator[tuple[str, str, int]]:
    places: dict[str, tuple[Path, str, int, int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MOST_HEADER:
                return
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                places[name] = file, str(entry["dtype"]), 8 + length + int(begin), int(end) - int(begin)
    alike: dict[str, str] = {}
    for name in sorted(places):
        alike.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), name)
    names = list(alike.values())
    picked = {round(k * (len(names) - 1) / (MOST_TENSORS - 1)) for k in range(MOST_TENSORS)} if names else set()
    # spread over the model at any time (by the golden ratio), so that a sample that ends early has its last layers too
    for at in sorted(picked, key=lambda k: k * 0.6180339887498949 % 1):
        file, dtype, start, size = places[names[at]]
        checksum = 0
        with file.open("rb", buffering=0) as stream:
            for place in range(PLACES):
                stream.seek(start + (size - BLOCK) * place // (PLACES - 1) if size > BLOCK else start)
                checksum = zlib.crc32(stream.read(min(BLOCK, size)), checksum)
        yield names[at], dtype, checksum


def target_sample(folder: Path) -> dict[str, Any]:
    """What a manifest says of a target's weights: `sampled_tensors`, if there are any."""
    sample = sampled_tensors(folder)
    return {"tensors": sample} if sample else {}
