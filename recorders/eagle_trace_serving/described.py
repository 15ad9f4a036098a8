"""What is said of a recorded server: in a manifest, to a client, and where its recorders do not report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order


def server_manifest(order: Order, facts: Facts) -> Manifest:
    """What a trace of this server says of itself; UsageError where it cannot be recorded."""
    if facts.refused:
        raise UsageError(facts.refused)
    manifest = Manifest("serve", order.level, facts.host, packages=dict(facts.packages))
    manifest.target, manifest.draft = _checkpoint(facts.target), _checkpoint(facts.draft)
    manifest.target |= target_sample(Path(facts.target))
    manifest.dtype, manifest.device = facts.dtype, facts.device
    manifest.draft |= {"architecture": facts.architecture, "family": facts.family}
    manifest.draft["dropped_keys"] = list(facts.dropped_keys)
    manifest.created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest.argv, manifest.changes = list(order.argv), list(order.changes)
    # whatever was asked for, the facts of the server stand
    manifest.settings = {**order.settings, **facts.settings}
    if left_out := order.selection.to_dict():
        manifest.settings["selection"] = left_out
    manifest.not_materialised += [dict(one) for one in facts.not_materialised]
    manifest.warnings += facts.warnings
    return manifest


def _checkpoint(path: str) -> dict[str, Any]:
    """Facts of a checkpoint; of one that is no folder here (a name on a hub) its name."""
    folder = Path(path)
    try:
        return checkpoint_facts(folder, read_config(folder))
    except CheckpointError:
        return {"path": path}


def told(facts: Facts) -> dict[str, Any]:
    """What a client may know of the server."""
    told = {name: getattr(facts, name) for name in ("target", "draft", "vocab_size", "context_length")}
    return told | {name: facts.settings[name] for name in ("steps", "topk", "draft_tokens") if name in facts.settings}


def silent_recorder(title: str) -> str:
    """Why the recorders of a server that is ready may not have reported."""
    return (
        f"{title} started, but its recorder did not report: the plugin `eagle_trace` was not loaded or found no draft "
        f"worker; is speculation on, is this a supported {title}, and does {title.upper()}_PLUGINS leave it out?"
    )
