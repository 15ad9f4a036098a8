"""A speculators EAGLE-3 checkpoint as the folder that SGLang loads.

Conventions that differ between the two, and are translated here:

- **Layer ids.** speculators means the *input* of layer i (Hugging Face `hidden_states[i]`), SGLang the *output*, so
  every id is lowered by one, except for target classes that read the list in a way of their own (`engine.py`).
- **Config.** speculators nests the decoder's config; SGLang wants it flat, with `architectures` and `eagle_config`.
- **Ties.** A speculators draft always has a head of its own; a tie flag inherited from the target would drop it.
- **Later layers.** A layer behind the first starts with `input_layernorm` in speculators, with `hidden_norm` in SGLang.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eagle_trace.checkpoints import class_names, read_config, text_config
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.exported import written_whole
from eagle_trace_analysis.checkpoint.files import INDEX, Checkpoint, StoredTensor, open_checkpoint, stored_dtype
from eagle_trace_analysis.checkpoint.kinds import refuse_other_types
from eagle_trace_analysis.engines import SGLANG, Engine
from eagle_trace_analysis.engines.refusal import shown
from eagle_trace_analysis.trainers import Trainer, speculators, trainer_of
from eagle_trace_analysis.trainers.speculators import DECODER

#: where `export` puts the tensors that SGLang wants under a second name
SECOND_NAMES = "hidden-norms.safetensors"


def read_trained_config(draft: Path) -> tuple[dict[str, Any], Trainer]:
    """The config of an EAGLE-3 checkpoint in a trainer's format, and the trainer.

    Raises:
        CheckpointError: there is no such folder, no config, or it is another kind of checkpoint.
    """
    config = read_config(draft)
    trainer = trainer_of(config)
    if trainer is None and config.get("kv_lora_rank") is not None:
        raise CheckpointError(
            f"{draft} is a draft with latent attention, which its trainers write as servers load it: deploy the folder "
            "as it is"
        )
    if trainer is None or DECODER not in config:
        raise CheckpointError(f"{draft} is not in speculators format: its config has no {DECODER}")
    refuse_other_types(draft, config.get("speculators_model_type"))
    if not isinstance(config[DECODER], Mapping):
        raise CheckpointError(f"the {DECODER} of {draft} is not an object")
    return dict(config), trainer


def _layers(target_config: Mapping[str, Any], target: Path) -> int:
    layers = text_config(target_config).get("num_hidden_layers")
    if type(layers) is not int:
        raise CheckpointError(f"{target / 'config.json'} is not a target's config: it has no num_hidden_layers")
    return layers


def trained_layer_ids(config: Mapping[str, Any], target: Path | None) -> list[int]:
    """Layer ids of the target features in speculators' convention (the default [2, L//2, L-3] needs the target's L).

    Raises:
        CheckpointError: the config names no list; or none, and there is no target to count the layers of.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise CheckpointError(
                f"eagle_aux_hidden_state_layer_ids in the speculators config is {shown(ids)}, not a list of layer ids"
            )
        return list(ids)
    if target is None:
        raise CheckpointError("the draft's config names no layer ids: give --target, whose layers the default counts")
    target_config = read_config(target)
    return speculators.default_layers(_layers(target_config, target))


def config_for(
    engine: Engine, config: Mapping[str, Any], layer_ids: list[int], dtype: str, target: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The engine's flat config for a draft trained with the speculators `config`.

    Args:
        engine: what is to serve it.
        layer_ids: ids in the trainer's convention, the inputs of layers.
        dtype: what the weights are stored in.
        target: the target's config; some target classes read layer ids in a way of their own.

    Raises:
        CheckpointError: the engine has no ids that capture these layers.
    """
    target = target or {}
    architecture = next(iter(class_names(target)), None)
    layers = text_config(target).get("num_hidden_layers")
    ids = engine.ids_that_capture(layer_ids, layers, architecture)
    if ids is None:
        raise CheckpointError(
            f"layer ids {layer_ids} cannot be said to {engine.TITLE}: it counts layer outputs from 0 (the embedding "
            f"output has no id) and feeds them in the order they run, and {architecture or 'the target class'} has no "
            "list for these; train with other layers"
        )
    flat = engine.flat_config(speculators.training_of(config), ids, dtype)
    # a quantised draft says so at the top of the config, where the engine looks too
    return flat | {key: config[key] for key in ("quantization_config", "compression_config") if config.get(key)}


def doubtful_ids(engine: Engine, ids: list[int], target: Mapping[str, Any] | None) -> list[str]:
    """A sentence if the layer ids of a speculators config look copied from a serving config as they are."""
    target = target or {}
    layers = text_config(target).get("num_hidden_layers")
    fitting = engine.copied_from_serving(ids, layers, next(iter(class_names(target)), None))
    if fitting is None:
        return []
    return [
        f"the layer ids {ids} look copied from a serving config: {engine.TITLE}'s {ids} are the inputs of layers "
        f"{engine.default_inputs(fitting)}, the default for {fitting} layers. If the draft was trained on those, set "
        f"eagle_aux_hidden_state_layer_ids to {engine.default_inputs(fitting)} and export again"
    ]


def second_names(tensors: Mapping[str, StoredTensor], engine: Engine) -> dict[str, StoredTensor]:
    """Stored tensors under the further names by which the engine looks for them (see `Engine.entering_norm`)."""
    found = {name: engine.entering_norm(engine.canonical_name(name)) for name in tensors}
    return {new: replace(tensors[old], name=new) for old, new in found.items() if new and new not in tensors}


def _write_weights(checkpoint: Checkpoint, out: Path, engine: Engine) -> None:
    """The files SGLang would load, as they are; torch's own as one safetensors file, beside which more can be laid."""
    if any(file.suffix != ".safetensors" for file in checkpoint.files):
        arrays = {name: np.ascontiguousarray(tensor.read()) for name, tensor in checkpoint.tensors.items()}
        save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
    else:
        for file in checkpoint.files:
            shutil.copyfile(file, out / file.name)
        index = checkpoint.folder / INDEX
        if index.is_file():
            shutil.copyfile(index, out / INDEX)
    for name in engine.SIDE_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, out / name)


def _write_second_names(tensors: Mapping[str, StoredTensor], out: Path, engine: Engine) -> None:
    extra = second_names(tensors, engine)
    if not extra:
        return
    save_file({name: tensor.read() for name, tensor in extra.items()}, out / SECOND_NAMES)
    path = out / INDEX
    if path.is_file():
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(extra, SECOND_NAMES)
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def export(
    draft: Path, out: Path, *, target: Path | None = None, force: bool = False, engine: Engine = SGLANG
) -> list[str]:
    """Write the engine's form of the speculators checkpoint `draft` into the folder `out`.

    Weights are copied as they are (a `.bin` becomes a safetensors file): SGLang reads speculators' tensor names and d2t
    offsets, but for the norms of `second_names`, which a further file holds. Returns what to be warned of: layer ids
    that look copied, and with `force` what SGLang will compute differently all the same.

    Raises:
        CheckpointError: `draft` is no EAGLE-3 speculators checkpoint, or SGLang cannot compute it and `force` is off.
        OutputExistsError, RecordingError: `out` is not to be replaced, or cannot be written; see `written_whole`.
    """
    config, trainer = read_trained_config(draft)
    reasons = [gap.why for gap in engine.gaps(trainer.training_of(config))]
    if reasons and not force:
        raise CheckpointError(
            f"{engine.ENGINE} cannot compute the draft {draft} as it was trained: {'; '.join(reasons)}. "
            "Retrain without it, or pass --force to export it all the same"
        )
    checkpoint = open_checkpoint(draft)
    tensors = checkpoint.tensors
    target_config = None if target is None else read_config(target)
    dtype = stored_dtype(tensors)
    if dtype is None:
        raise CheckpointError(f"{draft} holds no floating-point tensor")
    ids = trained_layer_ids(config, target)
    flat = config_for(engine, config, ids, dtype, target_config)
    refused = engine.refusals(flat)
    if refused:
        raise CheckpointError(
            f"{engine.TITLE} would stop at the config of {draft}: {'; '.join(refusal.why for refusal in refused)}"
        )
    if config.get("eagle_aux_hidden_state_layer_ids"):
        reasons += doubtful_ids(engine, ids, target_config)
    with written_whole(out, force=force, sources=(draft, target)) as folder:
        _write_weights(checkpoint, folder, engine)
        _write_second_names(tensors, folder, engine)
        (folder / "config.json").write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    return reasons
