"""What a training was run with that no checkpoint holds: a recipe, and what was changed of it on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_analysis.engines.refusal import shown

#: where SpecForge has each setting (`specforge/config/schema.py`), and what else it is called on command lines
PLACES: Mapping[str, tuple[str, ...]] = {
    "max_length": ("data.max_length", "training.max_seq_length", "max_length", "max_seq_length", "max_len"),
    "ttt_length": ("training.ttt_length", "ttt_length"),
    "torch_dtype": ("model.torch_dtype", "torch_dtype", "dtype"),
    "layer_ids": (
        "model.aux_hidden_state_layer_ids", "inference.aux_hidden_states_layers", "aux_hidden_state_layer_ids",
        "aux_hidden_states_layers",
    ),
    "draft_model_config": ("model.draft_model_config", "draft_model_config"),
}  # fmt: skip
#: what a recipe trains with if it does not say (`TrainingConfig`, `ModelConfig` of SpecForge)
STEPS, DTYPE = 7, "bfloat16"
#: no recipe is longer
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """The settings of a training that `check` asks for.

    Attributes:
        source: where they were read.
        max_length: tokens of the longest sequence; None if that is not said.
        ttt_length: steps of a training forward.
        torch_dtype: what the draft was trained in.
        layer_ids: layers that were captured, in the trainer's own count; None for its default.
        draft_model_config: a file or folder with the draft's config; None if none is named.
    """

    source: str
    max_length: int | None = None
    ttt_length: int = STEPS
    torch_dtype: str = DTYPE
    layer_ids: tuple[int, ...] | None = None
    draft_model_config: Path | None = None


def read_recipe(given: Sequence[str]) -> Recipe | None:
    """A recipe from YAML or JSON files and ``section.key=value`` settings, later ones over earlier; None for nothing.

    Raises:
        CheckpointError: a file cannot be read.
        UsageError: a setting is none, or PyYAML is missing.
    """
    if not given:
        return None
    settings: dict[str, Any] = {}
    folder = Path()
    for one in given:
        if Path(one).is_file() or "=" not in one:
            settings |= _flat(_load(Path(one)))
            folder = Path(one).resolve().parent
        else:
            key, _, value = one.partition("=")
            settings[key.strip().lstrip("-").replace("-", "_")] = _value(value, one)
    return _of(settings, folder, ", ".join(given))


def _of(settings: Mapping[str, Any], folder: Path, source: str) -> Recipe:
    found: dict[str, Any] = {}
    for name, places in PLACES.items():
        value = next((settings[place] for place in places if settings.get(place) is not None), None)
        if value is not None:
            found[name] = _checked(name, value, source)
    named = found.pop("draft_model_config", None)
    return Recipe(source, **found, draft_model_config=_beside(named, folder) if named else None)


def _checked(name: str, value: Any, source: str) -> Any:
    numbers = name in ("max_length", "ttt_length")
    if numbers and type(value) is int and value > 0:
        return value
    if name == "layer_ids" and isinstance(value, list) and value and all(type(one) is int for one in value):
        return tuple(value)
    if name in ("torch_dtype", "draft_model_config") and isinstance(value, str):
        return value
    wanted = "a number of 1 or more" if numbers else "a list of layer ids" if name == "layer_ids" else "a text"
    raise UsageError(f"{PLACES[name][0]} is {shown(value)} in {source}: it has to be {wanted}")


def _beside(named: str, folder: Path) -> Path | None:
    """A draft config that a recipe names: relative to where the trainer ran, which is the recipe's folder or above."""
    places = [Path(named), *(one / named for one in (folder, *folder.parents))]
    return next((place for place in places if place.exists()), None)


def _load(file: Path) -> Any:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{file} is not a recipe: it has more than {MOST_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read the recipe {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not a recipe: it is not text") from error
    try:
        found = json.loads(text) if file.suffix == ".json" else _yaml(text)
    except CheckpointError:
        raise
    except Exception as error:  # YAML's own errors are of several kinds, and deep nesting is another
        raise CheckpointError(f"{file} is neither YAML nor JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a recipe: it holds no settings by name")
    return found


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise CheckpointError("a recipe in YAML needs a package that is not installed: pip install pyyaml") from error
    return yaml.safe_load(text)


def _value(text: str, whole: str) -> Any:
    try:
        return _yaml(text)
    except CheckpointError:
        raise
    except Exception as error:
        raise UsageError(f"{whole} is not a setting such as data.max_length=4096") from error


def _flat(settings: Mapping[Any, Any], before: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and depth < 4:
            found |= _flat(value, f"{before}{key}.", depth + 1)
        else:
            found[f"{before}{key}"] = value
    return found
