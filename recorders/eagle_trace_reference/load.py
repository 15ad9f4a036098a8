"""Loading a published draft with latent attention into `LatentDraft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_trace.checkpoints import checkpoint_facts, read_config, text_config
from eagle_trace.errors import CheckpointError
from eagle_trace.families import EAGLE3_MLA
from eagle_trace_reference.host import CLASS, is_latent
from eagle_trace_reference.model import LatentDraft
from eagle_trace_reference.shape import Shape, shape_of
from eagle_trace_training.config import check_shapes
from eagle_trace_training.host import LoadedDraft
from eagle_trace_training.numerics import raise_dtype
from eagle_trace_training.published import (
    EMBEDDING,
    HEAD,
    Published,
    captured_inputs,
    from_target,
    read_flat_config,
    read_published,
)
from eagle_trace_training.weights import MAPS, target_config

FACTS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
    "draft_vocab_size",
)  # fmt: skip


def read_draft(draft: Path) -> Published:
    """Read a draft's folder.

    Raises:
        CheckpointError: it is another kind of folder, or damaged.
    """
    config = read_flat_config(draft)
    if not is_latent(config):
        raise CheckpointError(
            f"{draft} is a draft of class {config.get('architectures')}: the reference forward is that of {CLASS} "
            "alone, record the trainer of this draft"
        )
    return read_published(draft, lambda name: name)


def load_draft(draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
    """Load a draft in `dtype` onto `device`.

    Args:
        draft: folder in the format that servers load.
        target: folder of the target, None if none is needed.
        dtype: on-disk dtype name.
        device: ``cpu`` or ``cuda``.

    Raises:
        CheckpointError: the draft or the target is not what is needed, or they do not fit each other.
    """
    found = read_draft(draft)
    shape = shape_of(found)
    # parameters without storage, which the stored tensors take the place of: a large draft is never there twice
    with torch.device("meta"):
        model: Any = LatentDraft(shape)
    stored = set(found.state)
    notes = _fill(found, model, shape, target)
    dropped = _load(model, found)
    raise_dtype(model, dtype)
    layer_ids = _inputs(found, shape, target)
    if dropped:
        notes.append(f"in the draft's checkpoint, not used by the reference forward: {', '.join(dropped)}")
    if found.part("eagle_config").get("use_aux_hidden_state") is False:
        notes.append(
            f"the config says use_aux_hidden_state false, but fc takes {shape.features} target layers: it is fed those"
        )
    facts = checkpoint_facts(draft, read_config(draft)) | {
        "format": "reference",
        "family": EAGLE3_MLA.name,
        "layer_ids": layer_ids,
        "missing_keys": [],
        "dropped_keys": dropped,
        "translated": found.translated,
        **{name: found.config.get(name) for name in FACTS},
    }
    return LoadedDraft(
        model.to(device).eval(),
        layer_ids,
        stored,
        facts,
        fused_width=shape.features * shape.target,
        hidden_size=shape.target,
        heads=shape.heads,
        warnings=notes,
    )


def _fill(found: Published, model: Any, shape: Shape, target: Path | None) -> list[str]:
    """Take from the target what the checkpoint lacks; says what was taken."""
    # a tied head is the embedding, wherever that is from
    taken, notes = from_target(found.folder, {*found.state, HEAD} if shape.tied else found.state, model, target)
    found.state |= taken
    if shape.tied:
        found.state[HEAD] = found.state[EMBEDDING]
    return notes


def _load(model: Any, found: Published) -> list[str]:
    """Load the tensors; returns the names that have no place.

    Raises:
        CheckpointError: one is missing, or has another shape than the config says.
    """
    wanted = dict(model.named_parameters())
    if lacking := sorted(set(wanted) - set(found.state)):
        raise CheckpointError(f"{found.folder} lacks {', '.join(lacking)}, which a draft of {CLASS} needs")
    check_shapes(found.folder, {name: one.shape for name, one in found.state.items()}, wanted)
    for name in wanted:
        parts = name.split(".")
        owner = model.get_submodule(".".join(parts[:-1]))
        setattr(owner, parts[-1], torch.nn.Parameter(found.state[name], requires_grad=False))
    if "d2t" in found.state:
        model.d2t = found.state["d2t"].long()
    return sorted(set(found.state) - set(wanted) - set(MAPS))


def _inputs(found: Published, shape: Shape, target: Path | None) -> list[int] | None:
    """Target layers by Hugging Face's numbers, which is the input of layer i.

    Published drafts for targets of DeepSeek's kin name them in two ways: by the layers' outputs ([1, 29, 57]), or by
    their inputs ([2, 30, 58]). Servers of these targets take a list that begins with 1 for the former.
    """
    ids = found.layer_ids
    if ids is not None and len(ids) != shape.features:
        raise CheckpointError(
            f"{found.folder} names the target layers {ids}, and its fc takes {shape.features} of width {shape.target}"
        )
    if ids and target is not None and ids[0] != 1 and _is_latent_target(target):
        found.translated.append(f"target layers {ids}: taken for inputs of layers, since the first is not 1")
        layers = int(target_config(target).num_hidden_layers)
        if not all(0 <= i < layers for i in ids):
            raise CheckpointError(
                f"the draft {found.folder} takes features of layers {ids}; the target {target} has {layers} layers"
            )
        return sorted(ids)
    if ids is None and target is not None and shape.features != 3:
        raise CheckpointError(f"{found.folder} names no target layers, and its fc takes {shape.features} of them")
    inputs = captured_inputs(found, target)
    # layers are captured as they run
    return None if inputs is None else sorted(inputs)


def _is_latent_target(target: Path) -> bool:
    return text_config(read_config(target)).get("kv_lora_rank") is not None
