"""Loading a draft into SpecForge's class: built from the config as for training, then the weights.

Not `from_pretrained`, which builds on the meta device: the rotary tables, buffers that are not saved, get lost there.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

from eagle_trace.checkpoints import checkpoint_facts
from eagle_trace.errors import CheckpointError
from eagle_trace_specforge.published import head_config, read_head
from eagle_trace_training.config import check_shapes
from eagle_trace_training.host import LoadedDraft
from eagle_trace_training.numerics import quiet, raise_dtype
from eagle_trace_training.published import Published, captured_inputs, from_target
from eagle_trace_training.weights import MAPS, loading

FACTS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size",
)  # fmt: skip


def load_draft(draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
    """Load a draft in `dtype` onto `device`.

    Args:
        draft: folder in the format that servers load, as SpecForge exports it or as somebody published it.
        target: folder of the target, None if none is needed.
        dtype: on-disk dtype name.
        device: ``cpu`` or ``cuda``.

    Raises:
        CheckpointError: the draft or the target is not what is needed, or they do not fit each other.
    """
    head = read_head(draft)
    stored = set(head.state)
    model = _build(head)
    taken, notes = from_target(draft, head.state, model, target)
    head.state |= taken
    missing = _load(model, head)
    raise_dtype(model, dtype)  # not .to(dtype), which rounds the rotary tables as well
    layer_ids = captured_inputs(head, target)
    facts = checkpoint_facts(draft, head_config(draft)) | {
        "format": "specforge",
        "layer_ids": layer_ids,
        "missing_keys": missing,
        "dropped_keys": [],
        "translated": head.translated,
        **{name: getattr(model.config, name, None) for name in FACTS},
    }
    made = loaded(model.to(device).eval(), layer_ids)
    return replace(made, stored=stored, facts=facts, warnings=notes)


def ids_of(config: Any) -> list[int] | None:
    """Target layers that a config names, by Hugging Face's numbers (the input of layer i); None if it names none."""
    ids = (config.to_dict().get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if ids is None else [i + 1 for i in ids]


def loaded(model: Any, layer_ids: list[int] | None) -> LoadedDraft:
    """A model with what its config says of it."""
    return LoadedDraft(
        model,
        layer_ids,
        stored=set(model.state_dict()),
        facts={},
        fused_width=int(model.fc.in_features),
        hidden_size=int(model.target_hidden_size),
        heads=int(model.config.num_attention_heads),
    )


def _build(head: Published) -> Any:
    """SpecForge's model of a draft's config, in float32 and with its start values."""
    with tempfile.TemporaryDirectory() as folder, quiet(), contextlib.redirect_stdout(None):
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(head.config))
        with loading(f"SpecForge refuses the config of {head.folder}"):
            return AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(file)), attention_backend="sdpa")


def _load(model: Any, head: Published) -> list[str]:
    """Load the tensors; returns the names that are not there and need not be."""
    check_shapes(head.folder, {name: one.shape for name, one in head.state.items()}, model.state_dict())
    with loading(f"SpecForge cannot load {head.folder}"):
        missing, unexpected = model.load_state_dict(head.state, strict=False)
    # a draft over the whole vocabulary does without its maps, and no forward reads the inverse one
    whole = model.config.draft_vocab_size == model.config.vocab_size
    if lost := [name for name in missing if name not in (MAPS if whole else ("t2d",))]:
        raise CheckpointError(f"{head.folder} lacks {', '.join(lost)}, which SpecForge's draft needs")
    if unexpected:
        raise CheckpointError(f"{head.folder} holds {', '.join(unexpected)}, for which SpecForge's class has no place")
    return sorted(missing)
