"""What any trainer's recorder reads of folders: tensors of a draft, config and facts of a target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError, EagleTraceError
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row

#: safetensors' words for plain numbers
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: dtypes that a draft is trained or stored in; others are quantised
PLAIN = tuple(DTYPES.values())
#: maps between the target's vocabulary and the draft's own
MAPS = ("d2t", "t2d")
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


def stored_forms(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype (on-disk name) and shape of the tensors in a checkpoint folder, by their names; none is read."""
    found: dict[str, tuple[str, list[int]]] = {}
    for file in weight_files(folder):
        with weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                held = tensors.get_slice(name)
                code = held.get_dtype()
                found[name] = (DTYPES.get(code, code.lower()), held.get_shape())
    return found


def stored_tensor(folder: Path, name: str) -> Any | None:
    """The tensor of that name in a checkpoint folder, None if there is none."""
    for file in weight_files(folder):
        with weights(file) as tensors:
            if name in tensors.keys():  # noqa: SIM118 (no mapping)
                return tensors.get_tensor(name)
    return None


def stored_dtype(folder: Path) -> str:
    """On-disk name of the dtype to compute a draft in that is stored so: its `fc.weight`'s, float32 if it has none.

    Raises:
        CheckpointError: no draft is served in that.
    """
    found, _ = stored_forms(folder).get("fc.weight", ("float32", []))
    if found == "float64":
        raise CheckpointError(
            f"{folder} is stored in float64, in which no draft is served: say with --dtype what it is served in"
        )
    # of what is not stored as plain numbers, loading says that it cannot be computed
    return found if found in PLAIN else "float32"


def quantised_of(dtypes: Mapping[str, str]) -> list[str]:
    """The tensors that are not stored as plain numbers; the maps of the vocabulary are whole ones."""
    return sorted(name for name, dtype in dtypes.items() if dtype not in PLAIN and name not in MAPS)


def dtype_name(tensor: Any) -> str:
    """On-disk name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def draft_tensors(model: Any, not_draft: tuple[str, ...]) -> dict[str, Any]:
    """Parameters and buffers of a trainer's module by name, without those that begin as `not_draft`."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(not_draft)}


def parameter_rows(model: Any, not_draft: tuple[str, ...], stored: Set[str] | None) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet.

    Args:
        model: the trainer's module.
        not_draft: see `TrainingHost`.
        stored: names of the tensors in the checkpoint, None for a model in training, which has none.
    """
    for name, tensor in draft_tensors(model, not_draft).items():
        there = None if stored is None else name in stored
        yield parameter_row(name, canonical_name(name), tensor, in_checkpoint=there)


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


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn whatever a trainer's own loader makes of somebody's folder into a CheckpointError that begins with `what`.

    A library that validates configs raises errors of kinds of its own, and others stumble over what they do not check.
    """
    try:
        yield
    except EagleTraceError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What a library says went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:3])
    return f"it knows no {said}" if isinstance(error, KeyError) else said or type(error).__name__


def target_tensor(target: Path, name: str) -> Any:
    """The tensor of a target whose name ends in `name`, the shortest such name; None if there is none.

    Raises:
        CheckpointError: a file is damaged.
    """
    held: dict[str, Path] = {}
    for file in weight_files(target):
        with weights(file) as tensors:
            held |= {one: file for one in tensors.keys() if one == name or one.endswith(f".{name}")}  # noqa: SIM118
    if not held:
        return None
    # of all files: one that comes first may hold the layer of a target's own draft, with an embedding beside it
    shortest = min(held, key=len)
    with weights(held[shortest]) as tensors:
        return tensors.get_tensor(shortest)
