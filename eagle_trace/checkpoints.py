"""What both sides and the analysis read of a checkpoint folder: its config, and how to name it in a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}: give the folder of a checkpoint")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the folder of a checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: give the folder of a checkpoint ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to be a config") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that describes its language model: the config itself, or one it holds.

    The keys and their order are SGLang's (`get_hf_text_config`).
    """
    for key in ("thinker_config", "llm_config", "language_config", "text_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config(inner) if key == "thinker_config" else inner
    return config


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config's content, the same for the same content on both sides: 16 hex digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def checkpoint_facts(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Path, config and config digest of a checkpoint, as a manifest holds them."""
    return {"path": str(folder.resolve()), "config_digest": config_digest(config), "config": dict(config)}
