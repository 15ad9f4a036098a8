"""What the manifest of a recorded server says, from the facts that its recorders report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace_serving.orders import Order
from eagle_trace_sglang.deployment import ONE_REPLICA


def server_manifest(order: Order, facts: dict[str, Any]) -> Manifest:
    """What a trace of this server says of itself."""
    if facts["replicas"] != 1:
        raise UsageError(ONE_REPLICA)
    manifest = Manifest("serve", order.level, "sglang", packages=dict(facts["packages"]))
    manifest.target, manifest.draft = _checkpoint(facts["target"]), _checkpoint(facts["draft"])
    manifest.target |= target_sample(Path(facts["target"]))
    manifest.dtype, manifest.device = facts["dtype"], facts["device"]
    manifest.draft |= {name: facts[name] for name in ("architecture", "dropped_keys")}
    manifest.created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest.argv, manifest.changes = list(order.argv), list(order.changes)
    told = ("algorithm", "steps", "topk", "draft_tokens", "prefix_cache")
    # whatever was asked for, the facts of the server stand
    manifest.settings = {**order.settings, **{name: facts[name] for name in told}}
    if left_out := order.selection.to_dict():
        manifest.settings["selection"] = left_out
    if facts["dropped_keys"]:
        manifest.warnings.append(f"SGLang dropped from the draft's checkpoint: {', '.join(facts['dropped_keys'])}")
    for site in ("logits", "topk.draft_id", "topk.target_id"):
        why = "SGLang computes logits for the last row of a prefill only"
        manifest.not_materialised.append({"site": site, "rows": "prefill", "why": why})
    for site in facts["partial_sums"]:
        why = "SGLang leaves this sum unfinished on each rank and completes it in a later kernel"
        manifest.not_materialised.append({"site": site, "rows": "all", "why": why})
    manifest.warnings += facts["warnings"]
    if facts["fused_mlp"]:
        why = "SGLang runs gate, up and activation in one kernel on this GPU"
        manifest.not_materialised += [
            {"site": f"layer.0.mlp.{name}", "rows": "all", "why": why} for name in ("gate", "up", "act")
        ]
    return manifest


def _checkpoint(path: str) -> dict[str, Any]:
    """Facts of a checkpoint; of one that is no folder here (a name on a hub) its name."""
    folder = Path(path)
    try:
        return checkpoint_facts(folder, read_config(folder))
    except CheckpointError:
        return {"path": path}
