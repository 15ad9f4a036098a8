"""What the manifest says of a model that is in training: no checkpoint, maybe one of several ranks."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle_trace import __version__
from eagle_trace.checkpoints import config_digest
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import Manifest, without_secrets
from eagle_trace_speculators.load import config_facts, target_facts
from eagle_trace_speculators.record import HOST, PACKAGES, package_version

FLEX = "simple_flex_attention"


def unwrapped(model: Any) -> tuple[Any, bool]:
    """The `Eagle3DraftModel` inside DistributedDataParallel, torch.compile or nothing, and whether it was compiled.

    Raises:
        UsageError: there is none.
    """
    inner, compiled = model, False
    while not isinstance(inner, Eagle3DraftModel):
        original = getattr(inner, "_orig_mod", None)
        compiled = compiled or original is not None
        inner = original or getattr(inner, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise UsageError(
                f"recording() takes speculators' Eagle3DraftModel, or a wrapper around one, not {type(model).__name__}"
            )
    kind = getattr(inner.config, "speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UsageError(f"recording() takes an eagle3 draft, not a {kind} one: its forward has other sites")
    return inner, compiled


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) where torch.distributed was not set up."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def is_sharded(model: Any) -> bool:
    """Whether this process holds parts of the parameters only (FSDP)."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def live_manifest(model: Any, level: str) -> Manifest:
    """The manifest of a recording that begins; what the first forward shows comes later.

    Args:
        model: the `Eagle3DraftModel` in training.
        level: how much to keep of each row.
    """
    config = json.loads(model.config.to_json_string())
    layer_ids = model.config.eagle_aux_hidden_state_layer_ids
    facts = {
        # no path: what is on disk is not what is in training
        "path": None,
        "started_from": str(model.config.name_or_path or "") or None,
        "config_digest": config_digest(config),
        "config": config,
    }
    return Manifest(
        side="train",
        level=level,
        host=HOST,
        packages={name: package_version(name) for name in PACKAGES} | {"eagle-trace": __version__},
        target=_target(model),
        draft=facts | config_facts(model.config, list(layer_ids) if layer_ids else None),
        device=model.fc.weight.device.type,
        argv=without_secrets(sys.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _target(model: Any) -> dict[str, Any]:
    name = getattr(model.config.speculators_config.verifier, "name_or_path", None)
    if not name or not Path(name).is_dir():
        return {"path": name}
    try:
        return target_facts(Path(name))
    except CheckpointError:
        return {"path": name}
