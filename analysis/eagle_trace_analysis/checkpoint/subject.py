"""What is checked: the draft as the engine would see it, and what is known of its training and its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config, text_config
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.export import config_for, second_names, trained_layer_ids
from eagle_trace_analysis.checkpoint.files import (
    Checkpoint,
    StoredTensor,
    has_weights,
    open_checkpoint,
    stored_dtype,
)
from eagle_trace_analysis.checkpoint.kinds import Kind, recognise, refuse_other_types
from eagle_trace_analysis.engines import SGLANG, Engine, Gap
from eagle_trace_analysis.engines.refusal import Refusal
from eagle_trace_analysis.engines.sglang.accepts import SIZES
from eagle_trace_analysis.trainers import Trainer, Training, trainer_of
from eagle_trace_analysis.trainers.base import flat_training

#: sizes of a target's layers that no check reads
UNREAD = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Target:
    """The target model: its text config, its weights where they are there, and what the engine stops at."""

    folder: Path
    config: Mapping[str, Any]
    architecture: str | None
    refused: Sequence[Refusal] = ()

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Headers of the weights; None if the folder has none (a config alone is enough for most checks)."""
        if not has_weights(self.folder):
            return None
        return open_checkpoint(self.folder)

    def find(self, ending: str) -> StoredTensor | None:
        """The one tensor whose name ends so (``embed_tokens.weight``), whatever the model's prefix."""
        tensors = self.checkpoint.tensors.values() if self.checkpoint else ()
        # vision towers have embeddings too: the text model's is the one with a row a token
        found = [
            t
            for t in tensors
            if t.name.endswith(ending) and len(t.shape) == 2 and t.shape[0] >= int(self.config.get("vocab_size") or 2)
        ]
        return found[0] if len(found) == 1 else None

    @property
    def embedding(self) -> StoredTensor | None:
        """The token embedding [vocabulary, hidden]."""
        return self.find("embed_tokens.weight")

    @property
    def head(self) -> StoredTensor | None:
        """The output projection [vocabulary, hidden]; the embedding if the two are tied."""
        return self.find("lm_head.weight") or (self.embedding if self.config.get("tie_word_embeddings") else None)


@dataclass(frozen=True)
class Subject:
    """A draft checkpoint with all that is known around it.

    Attributes:
        served: flat config as the engine reads it (of a speculators draft: what `eagle-trace export` writes).
        trained: config of the training, from the draft itself or its reference; None if neither has one.
        trainer: who wrote `trained`.
        trained_ids: layer ids of the training (inputs of layers), None if not to be known.
        refused: what the engine's config loader stops at; `served` is without it.
        engine: what is to serve the draft.
    """

    checkpoint: Checkpoint
    format: str
    served: Mapping[str, Any]
    trained: Mapping[str, Any] | None
    trained_ids: list[int] | None
    target: Target | None
    reference: Checkpoint | None
    refused: Sequence[Refusal] = ()
    engine: Engine = SGLANG
    trainer: Trainer | None = None

    @cached_property
    def training(self) -> Training | None:
        """How the draft was trained, None if that is not known."""
        return None if self.trained is None or self.trainer is None else self.trainer.training_of(self.trained)

    @cached_property
    def gaps(self) -> list[Gap]:
        """What of the training the engine has no form of; of what the served config says, if that is all there is."""
        return self.engine.gaps(self.training or flat_training(self.served))

    def gap(self, setting: str) -> Gap | None:
        """The gap of one trained setting."""
        return next((gap for gap in self.gaps if gap.setting == setting), None)

    @cached_property
    def trained_rope(self) -> dict[str, Any] | None:
        """The rotary embedding of the training, in the engine's form; None if the training is not known."""
        if self.trained_layer is None or self.trainer is None:
            return None
        return self.trainer.rope(self.trained_layer, self.engine.rope_settings(self.trained_layer))

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes are there that every check of a shape needs."""
        # the others of SIZES follow from these
        needed = SIZES[:8]
        return all(refusal.key not in needed or self.served.get(refusal.key) for refusal in self.refused)

    @cached_property
    def full(self) -> dict[str, Any]:
        """The served config with transformers' defaults filled in."""
        return self.engine.with_defaults(self.served)

    @cached_property
    def trained_layer(self) -> dict[str, Any] | None:
        """The trained decoder config with defaults, None if the training is not known."""
        return None if self.training is None else self.engine.with_defaults(self.training.decoder)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Stored tensors by speculators' names; of two with one name the last, as on loading."""
        return {self.engine.canonical_name(tensor.name): tensor for tensor in self.checkpoint.tensors.values()}

    @cached_property
    def kind(self) -> Kind | None:
        """What the folder holds if not an EAGLE-3 draft of the class known here."""
        return None if self.is_speculators else recognise(self.tensors, self.served, self.engine)

    @property
    def target_architecture(self) -> str | None:
        """Class name of the target."""
        return self.target.architecture if self.target else None

    @property
    def target_layers(self) -> int | None:
        """Number of the target's layers."""
        return self.target.layers if self.target else None

    @property
    def is_speculators(self) -> bool:
        """Whether the draft folder is in speculators format."""
        return self.format == "speculators"


def open_target(folder: Path, engine: Engine = SGLANG) -> Target:
    """The target's config, the text part of a multimodal one.

    Raises:
        CheckpointError: no config, or one that counts no layers.
    """
    config = read_config(folder)
    own = dict(text_config(config))
    if not isinstance(own.get("num_hidden_layers"), int):
        raise CheckpointError(f"{folder / 'config.json'} is not a target's config: it has no num_hidden_layers")
    # some models have a size per layer, where one number is read here of a draft
    own = {key: value for key, value in own.items() if key not in UNREAD or not isinstance(value, list)}
    _need_numbers(folder, own, engine)
    for outer in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if outer in config:
            own.setdefault(outer, config[outer])
    if engine.config_class(own) is not None:
        # the defaults of other families are not known here: what their config omits is not compared
        own = engine.with_defaults(own)
    # a multimodal target is registered under the outer class
    architecture = engine.target_class(config.get("architectures") or own.get("architectures"))
    return Target(folder, own, architecture, engine.target_refusals(config, text_config(config)))


def open_subject(draft: Path, target: Path | None, reference: Path | None, engine: Engine = SGLANG) -> Subject:
    """Configs and headers of everything named; no tensor is read.

    Raises:
        CheckpointError: something named cannot be read, or the draft is no EAGLE-3 draft of a kind known
            here.
    """
    engine = engine.other_class(read_config(draft)) or engine
    checkpoint = _open_exported(draft, engine)
    known_target = open_target(target, engine) if target else None
    other = _open_exported(reference, engine) if reference else None
    trained: Mapping[str, Any] | None = None
    ids: list[int] | None = None
    trainer: Trainer | None = None
    for candidate in (checkpoint, other):
        if candidate is not None and trainer is None and (trainer := trainer_of(candidate.config)) is not None:
            _refuse_others(candidate, trainer, engine)
            trained = candidate.config
            ids = _trained_ids(trained, target)
    written = trainer_of(checkpoint.config)
    if written is not None:
        served, kind = _as_exported(checkpoint, ids, known_target, engine), written.NAME
    else:
        served, kind = dict(checkpoint.config), engine.NAME
    refused, served = engine.refusals(served), engine.repaired(served)
    return Subject(checkpoint, kind, served, trained, ids, known_target, other, refused, engine, trainer)


def _open_exported(folder: Path, engine: Engine) -> Checkpoint:
    """A checkpoint; of one in speculators format with the names that `eagle-trace export` adds."""
    checkpoint = open_checkpoint(folder)
    if trainer_of(checkpoint.config) is not None:
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, **second_names(checkpoint.tensors, engine)})
    return checkpoint


def _need_numbers(folder: Path, config: Mapping[str, Any], engine: Engine) -> None:
    """Refuse a decoder config whose numbers are none, before anything is reckoned with them."""
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
        "target_hidden_size",
        "num_aux_hidden_states",
        "max_position_embeddings",
    )
    path = folder / "config.json"
    for key in sizes:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{path} says {key}: {value!r}, which is not a size")
    eps = config.get("rms_norm_eps", 0.0)
    if not isinstance(eps, int | float):
        raise CheckpointError(f"{path} says rms_norm_eps: {eps!r}, which is not a number")
    for key in ("rope_parameters", "rope_scaling", "eagle_config"):
        if not isinstance(config.get(key, {}), Mapping | None):
            raise CheckpointError(f"{path} says {key}: {config[key]!r}, which is not an object")
    if not isinstance(config.get("architectures", []), list | None):
        raise CheckpointError(f"{path} says architectures: {config['architectures']!r}, which is not a list")
    ids = engine.layer_ids(config) or []
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"{path} says eagle_aux_hidden_state_layer_ids: {ids!r}, which is not a list of layer ids"
        )


def _refuse_others(checkpoint: Checkpoint, trainer: Trainer, engine: Engine) -> None:
    refuse_other_types(checkpoint.folder, checkpoint.config.get("speculators_model_type", "eagle3"))
    decoder = trainer.training_of(checkpoint.config).decoder
    for config in (decoder, checkpoint.config):
        _need_numbers(checkpoint.folder, config, engine)


def _trained_ids(config: Mapping[str, Any], target: Path | None) -> list[int] | None:
    if not config.get("eagle_aux_hidden_state_layer_ids") and target is None:
        return None
    return trained_layer_ids(config, target)


def _as_exported(
    checkpoint: Checkpoint, ids: list[int] | None, target: Target | None, engine: Engine
) -> dict[str, Any]:
    config = checkpoint.config
    # ids that cannot be written down are the layer-ids check's to report; any others stand in for them here
    writable = ids if ids and min(ids) >= 1 else list(range(1, 1 + len(ids or (1, 2, 3))))
    seen: dict[str, Any] = {}
    if target and engine.ids_that_capture(writable, target.layers, target.architecture) is not None:
        seen = {"architectures": [target.architecture], "num_hidden_layers": target.layers}
    served = config_for(engine, config, writable, stored_dtype(checkpoint.tensors) or "float32", seen)
    if ids is None or writable != ids:
        served["eagle_config"] = {
            k: v for k, v in served["eagle_config"].items() if k != "eagle_aux_hidden_state_layer_ids"
        }
        served["num_aux_hidden_states"] = len(writable)
    return served
