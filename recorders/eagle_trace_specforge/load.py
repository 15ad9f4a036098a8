"""Loading a draft into SpecForge's class: built from the config as for training, then the weights.

Not `from_pretrained`, which builds on the meta device: the rotary tables, buffers that are not saved, get lost there.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

from eagle_trace.checkpoints import checkpoint_facts
from eagle_trace.errors import CheckpointError
from eagle_trace_specforge.published import Published, head_config, read_head
from eagle_trace_training.host import LoadedDraft, TrainingHost
from eagle_trace_training.numerics import quiet, raise_dtype
from eagle_trace_training.weights import first_line, target_config, target_tensor

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
#: buffers that a draft over the whole vocabulary does without
MAPS = ("d2t", "t2d")


def load_draft(host: TrainingHost, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
    """Load a draft in `dtype` onto `device`.

    Args:
        host: SpecForge.
        draft: folder in the format that servers load, as SpecForge exports it or as somebody published it.
        target: folder of the target, None if none is needed.
        dtype: on-disk dtype name.
        device: ``cpu`` or ``cuda``.

    Raises:
        CheckpointError: the draft or the target is not what is needed, or they do not fit each other.
    """
    head = read_head(draft)
    stored = set(head.state)
    model = _build(head, draft)
    notes = _fill_from_target(head, model, draft, target)
    missing, unexpected = model.load_state_dict(head.state, strict=False)
    whole = model.config.draft_vocab_size == model.config.vocab_size
    if lost := [name for name in missing if name not in (MAPS if whole else ("t2d",))]:
        raise CheckpointError(f"{draft} lacks {', '.join(lost)}, which SpecForge's draft needs")
    if unexpected:
        raise CheckpointError(f"{draft} holds {', '.join(unexpected)}, for which SpecForge's class has no place")
    raise_dtype(model, dtype)  # not .to(dtype), which rounds the rotary tables as well
    config = head_config(draft)
    layer_ids = _layer_ids(head, draft, target)
    facts = checkpoint_facts(draft, config) | {
        "format": "specforge",
        "layer_ids": layer_ids,
        "missing_keys": sorted(set(missing)),
        "dropped_keys": [],
        "translated": head.translated,
        **{
            name: getattr(model.config, name, None)
            for name in (
                "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size",
            )
        },
    }  # fmt: skip
    return LoadedDraft(
        host,
        model.to(device).eval(),
        layer_ids,
        stored,
        facts,
        fused_width=int(model.fc.in_features),
        hidden_size=int(model.target_hidden_size),
        heads=int(model.config.num_attention_heads),
        warnings=notes,
    )


def _build(head: Published, draft: Path) -> Any:
    """SpecForge's model of a head's config, in float32 and with its start values."""
    with tempfile.TemporaryDirectory() as folder, quiet(), contextlib.redirect_stdout(None):
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(head.config))
        try:
            return AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(file)), attention_backend="sdpa")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"SpecForge refuses the config of {draft}: {first_line(error)}") from error


def _fill_from_target(head: Published, model: Any, draft: Path, target: Path | None) -> list[str]:
    """Take the embedding, and a head over the whole vocabulary, from the target where there is none."""
    wanted = [name for name in (EMBEDDING, HEAD) if name not in head.state]
    if wanted and target is None:
        raise CheckpointError(
            f"the draft {draft} has no {' and no '.join(wanted)}: give the target that it takes them from"
        )
    for name in wanted:
        assert target is not None
        tensor = target_tensor(target, name)
        if tensor is None and name == HEAD:
            tensor = target_tensor(target, EMBEDDING)  # tied
        place = model.get_parameter(name)
        if tensor is None or tensor.shape != place.shape:
            what = "none" if tensor is None else f"one of {list(tensor.shape)}"
            raise CheckpointError(f"the draft {draft} needs a {name} of {list(place.shape)}; {target} has {what}")
        head.state[name] = tensor
    return [f"{name} is not in the draft's checkpoint: taken from the target, as servers do" for name in wanted]


def _layer_ids(head: Published, draft: Path, target: Path | None) -> list[int] | None:
    """Target layers by Hugging Face's numbers (the input of layer i), SpecForge's default where the draft has none."""
    ids = head.layer_ids
    if target is not None:
        layers = int(target_config(target).num_hidden_layers)
        if ids is None:
            ids = [1, layers // 2 - 1, layers - 4]
        if len(ids) != 3 or not all(isinstance(i, int) and 0 <= i < layers for i in ids):
            raise CheckpointError(
                f"the draft {draft} takes its features from layers {ids}; {target} has {layers} layers"
            )
    return None if ids is None else [i + 1 for i in ids]
