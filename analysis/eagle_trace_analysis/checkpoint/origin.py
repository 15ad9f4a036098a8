"""Who trained a draft, and how, as far as folders and files say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import parsed, read_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_analysis.checkpoint.files import Checkpoint, StoredTensor, has_weights, open_checkpoint
from eagle_trace_analysis.checkpoint.torchfile import read_torch_file
from eagle_trace_analysis.trainers import Trainer, specforge, told_by, trainer_named, trainer_of
from eagle_trace_analysis.trainers.base import Doubt, Folder

#: what SpecForge writes while it trains, and where a checkpoint's draft is in it
STATE_FILE, STATE_KEY = "training_state.pt", "draft_state_dict"
#: names of the draft's config that such a checkpoint is looked for with, in its folder or the one above
CONFIGS = ("draft_config.json", "config.json")


@dataclass(frozen=True)
class Origin:
    """The trainer that left a folder.

    Attributes:
        why: by what it was told.
        sure: nothing else known here leaves that.
        release: of the trainer, if it was said.
    """

    trainer: Trainer
    why: Sequence[str]
    sure: bool
    release: str | None = None

    @property
    def words(self) -> str:
        """For a report: the trainer, and by what it was told."""
        seems = "" if self.sure else ", it seems"
        return f"written by {self.trainer.TITLE}{seems}: {', '.join(self.why)}"

    def doubts(self, config: Mapping[str, Any], theta: float) -> list[Doubt]:
        """See `Trainer.doubts`."""
        return list(self.trainer.doubts(config, theta, self.release))


@dataclass(frozen=True)
class Reference:
    """What was given as a draft's reference.

    Attributes:
        checkpoint: its weights, if it has any.
        config: of the training.
        trainer: whose config it is; None if it says nothing of a training.
    """

    checkpoint: Checkpoint | None
    config: Mapping[str, Any]
    trainer: Trainer | None


def origin_of(checkpoint: Checkpoint, named: str | None) -> Origin | None:
    """The trainer of a folder: the one that was named (``specforge==0.2.0``), else the one that it was told to be.

    Raises:
        UsageError: no trainer is called so.
    """
    if named is not None:
        trainer, release = trainer_named(named)
        return Origin(trainer, ("--trainer says so",), True, release)
    if is_state(checkpoint):
        return Origin(specforge, (f"it is a checkpoint in training ({STATE_FILE})",), True)
    files = [file.name for file in checkpoint.files]
    told = told_by(Folder(checkpoint.config, list(checkpoint.tensors), files, checkpoint.metadata))
    return None if told is None else Origin(told[0], told[1].why, told[1].sure)


def is_state(checkpoint: Checkpoint) -> bool:
    """Whether it is what SpecForge leaves in training."""
    return [file.name for file in checkpoint.files] == [STATE_FILE]


def open_draft(place: Path) -> Checkpoint:
    """A draft's folder: of weights, of an index alone, or a checkpoint that SpecForge left in training.

    Raises:
        CheckpointError: it is none of these.
    """
    if place.is_dir() and is_state_folder(place):
        return _open_state(place)
    if place.is_file():
        raise CheckpointError(
            f"{place} is a file: give a checkpoint's folder; the config of a training is a --reference"
        )
    return open_checkpoint(place, index_alone=True)


def open_reference(place: Path, origin: Origin | None) -> Reference:
    """What a reference says: a folder of weights, a config alone, a checkpoint in training.

    Args:
        place: a folder, or the file of a draft's config.
        origin: of the draft that it is a reference for; a config alone is taken for the same trainer's.

    Raises:
        CheckpointError: it is none of these.
        UsageError: it is a config alone, and nothing says whose.
    """
    if place.is_file() and place.suffix == ".json":
        return _config_alone(place, _json(place), origin)
    if place.is_file():
        raise CheckpointError(
            f"{place} is not a folder: give a checkpoint's folder, or a draft's config.json; a recipe goes to --recipe"
        )
    if place.is_dir() and is_state_folder(place):
        found = _open_state(place)
        return Reference(found, found.config, specforge)
    if place.is_dir() and not has_weights(place) and (place / "config.json").is_file():
        return _config_alone(place, read_config(place), origin)
    checkpoint = open_checkpoint(place)
    trainer = trainer_of(checkpoint.config)
    if trainer is None:
        told = origin_of(checkpoint, None)
        # of others an export says what is served, and may have been mended since
        trainer = told.trainer if told is not None and told.trainer is specforge else None
    return Reference(checkpoint, checkpoint.config, trainer)


def _config_alone(place: Path, config: Mapping[str, Any], origin: Origin | None) -> Reference:
    trainer = trainer_of(config)
    if trainer is None:
        told = told_by(Folder(config, ()))
        trainer = told[0] if told is not None else origin.trainer if origin is not None else None
    if trainer is None:
        raise UsageError(
            f"{place} holds a config and no weights, and nothing says which trainer it is for: give --trainer as well, "
            "for example --trainer specforge==0.2.0"
        )
    return Reference(None, config, trainer)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return found


def is_state_folder(folder: Path) -> bool:
    """Whether a folder is what SpecForge leaves in training, and is no draft's yet."""
    return not (folder / "config.json").is_file() and (folder / STATE_FILE).is_file()


def _open_state(folder: Path) -> Checkpoint:
    """What `specforge export` would make of a checkpoint in training: names as they are, no embedding."""
    places = [place / name for place in (folder, folder.resolve().parent) for name in CONFIGS]
    config = next((place for place in places if place.is_file()), None)
    if config is None:
        raise CheckpointError(
            f"{folder} is a checkpoint of SpecForge in training, which does not hold its draft's config: put the "
            f"{CONFIGS[0]} beside it, or give the folder that `specforge export --to sglang` writes"
        )
    file = folder / STATE_FILE
    found = {
        one.name: StoredTensor(one.name, one.dtype, one.shape, file, one.start, one.nbytes, one.strides)
        for one in read_torch_file(file, STATE_KEY)
        if "embed" not in one.name.lower()
    }
    return Checkpoint(folder, _json(config) | {"tie_word_embeddings": False}, found)
