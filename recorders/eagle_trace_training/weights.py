"""What any trainer's recorder reads of folders: tensors of a draft, config and facts of a target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError

TARGET_FACTS = (
    "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """The weights files of a checkpoint folder, by name."""
    return sorted(folder.glob("*.safetensors"))


@contextlib.contextmanager
def weights(file: Path) -> Iterator[Any]:
    """An open weights file; raises CheckpointError if it is cut off or altered."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)}): copy or save the checkpoint again") from error


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint folder."""
    names: set[str] = set()
    for file in weight_files(folder):
        with weights(file) as tensors:
            names |= set(tensors.keys())
    return names


def stored_dtype(folder: Path) -> str:
    """On-disk name of the dtype that a draft's `fc.weight` is stored in, float32 if there is none."""
    for file in weight_files(folder):
        with weights(file) as tensors:
            if "fc.weight" in tensors.keys():  # noqa: SIM118 (no mapping)
                return str(tensors.get_tensor("fc.weight").dtype).removeprefix("torch.")
    return "float32"


def target_config(target: Path) -> Any:
    """The config of a target's language model; raises CheckpointError if there is none."""
    from transformers import AutoConfig

    if not target.is_dir():
        raise CheckpointError(f"there is no target at {target}: no such folder")
    try:
        # never the code that lies in the folder: transformers would ask on the terminal, and wait
        config = AutoConfig.from_pretrained(str(target), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"cannot read the config of the target {target}: {first_line(error)}") from error
    return getattr(config, "text_config", config)


def target_facts(target: Path) -> dict[str, Any]:
    """What the manifest says about a target."""
    config = target_config(target)
    facts = checkpoint_facts(target, read_config(target))
    return facts | {name: getattr(config, name, None) for name in TARGET_FACTS} | target_sample(target)


def first_line(error: Exception) -> str:
    """What a library says went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


def target_tensor(target: Path, name: str) -> Any:
    """The tensor of a target whose name ends in `name`, the shortest such name; None if there is none.

    Raises:
        CheckpointError: a file is damaged.
    """
    for file in weight_files(target):
        with weights(file) as tensors:
            found = sorted(
                (one for one in tensors.keys() if one == name or one.endswith(f".{name}")),  # noqa: SIM118
                key=len,
            )
            if found:
                return tensors.get_tensor(found[0])
    return None
