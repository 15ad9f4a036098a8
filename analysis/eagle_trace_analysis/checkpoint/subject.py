"""What is checked: the draft as the engine would see it, and what is known of its training and its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config, text_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.families import EAGLE3
from eagle_trace_analysis.checkpoint.export import config_for, second_names, trained_layer_ids
from eagle_trace_analysis.checkpoint.files import Checkpoint, StoredTensor, has_weights, open_checkpoint, stored_dtype
from eagle_trace_analysis.checkpoint.kinds import Kind, recognise, refuse_other_types
from eagle_trace_analysis.checkpoint.origin import Origin, Reference, is_state, open_draft, open_reference, origin_of
from eagle_trace_analysis.checkpoint.recipe import Recipe
from eagle_trace_analysis.engines import SGLANG, Engine, Gap
from eagle_trace_analysis.engines.refusal import Refusal
from eagle_trace_analysis.engines.sglang.accepts import SIZES
from eagle_trace_analysis.trainers import Trainer, Training, specforge, speculators, trainer_of
from eagle_trace_analysis.trainers.base import Doubt, flat_training
from eagle_trace_analysis.trainers.flat import outputs_named

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
        origin: the trainer that left the draft's folder; None if nothing says which.
        recipe: what the training was run with; None if none was given.
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
    origin: Origin | None = None
    recipe: Recipe | None = None

    @property
    def release(self) -> str | None:
        """Of the trainer, if it was said."""
        return self.origin.release if self.origin is not None else None

    @cached_property
    def training(self) -> Training | None:
        """How the draft was trained, None if that is not known."""
        if self.trained is None or self.trainer is None:
            return None
        return self.trainer.training_of(self.trained, self.release)

    @property
    def ask(self) -> str:
        """What to give where the training has to be known and is not."""
        if self.origin is None and EAGLE3.name != self.engine.FAMILY:
            return "how it was trained is not known: no trainer known here writes it down for such a draft"
        trainer = self.origin.trainer if self.origin is not None else speculators
        return f"the training config is not known: give --reference, {trainer.REFERENCE}"

    def form(self, setting: str) -> bool | None:
        """A setting that the trainer's class has in one form only; None if it has both, or the trainer is not known."""
        return self.origin.trainer.FORMS.get(setting) if self.origin is not None else None

    def doubt(self, check: str) -> Doubt | None:
        """What the trainer does otherwise than the config says, for one check."""
        return next((doubt for doubt in self._doubts if doubt.check == check), None)

    @cached_property
    def _doubts(self) -> list[Doubt]:
        if self.origin is None or self.is_speculators:
            return []
        # the config that was trained with, where it is given
        flat = self.trained if self.trainer is not None and not self.trainer.recognises(self.trained or {}) else None
        theta = float(self.engine.rope_settings(self.full)["rope_theta"])
        return self.origin.doubts(self.served if flat is None else flat, theta)

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


def open_subject(
    draft: Path,
    target: Path | None,
    reference: Path | None,
    engine: Engine = SGLANG,
    *,
    trainer: str | None = None,
    recipe: Recipe | None = None,
) -> Subject:
    """Configs and headers of everything named; no tensor is read.

    Args:
        draft: its folder.
        target: the target's, None if none is given.
        reference: another checkpoint of the draft, or the config it was trained with.
        engine: what is to serve the draft.
        trainer: who trained it, as ``specforge==0.2.0``; None to have it told.
        recipe: what the training was run with.

    Raises:
        CheckpointError: something named cannot be read, or the draft is no EAGLE-3 draft of a kind known
            here.
        UsageError: no trainer is called so, or a reference does not say whose it is.
    """
    found = open_draft(draft)
    engine = engine.other_class(found.config) or engine
    checkpoint = _as_exported_names(found, engine)
    origin = origin_of(checkpoint, trainer)
    known_target = open_target(target, engine) if target else None
    if reference is None and recipe is not None:
        reference = recipe.draft_model_config
    other = open_reference(reference, origin) if reference else None
    if other is not None and other.checkpoint is not None:
        other = replace(other, checkpoint=_as_exported_names(other.checkpoint, engine))
    own = trainer_of(checkpoint.config)
    if own is not None and trainer is not None and origin is not None and origin.trainer is not own:
        raise UsageError(f"{draft} is in {own.TITLE}'s format, and --trainer names {origin.trainer.TITLE}")
    trained: Mapping[str, Any] | None = None
    ids: list[int] | None = None
    by = own
    if own is not None:
        trained = checkpoint.config
    elif is_state(checkpoint):
        trained, by = checkpoint.config, specforge
    elif other is not None and other.trainer is not None:
        trained, by = other.config, other.trainer
        if origin is None or (trainer is None and not origin.sure and origin.trainer is not by):
            origin = Origin(by, (f"{reference} is its",), True)
    if trained is not None and by is not None:
        _refuse_others(checkpoint if own is not None else other, by, engine)
        ids = _trained_ids(trained, by, known_target, recipe)
    elif origin is not None and recipe is not None and recipe.layer_ids:
        ids = _trained_ids({}, origin.trainer, known_target, recipe)
    if own is not None:
        served, kind = _as_exported(checkpoint, ids, known_target, engine), own.NAME
    else:
        served, kind = dict(checkpoint.config), engine.NAME
    refused, served = engine.refusals(served), engine.repaired(served)
    weights = other.checkpoint if other is not None else None
    return Subject(checkpoint, kind, served, trained, ids, known_target, weights, refused, engine, by, origin, recipe)


def _as_exported_names(checkpoint: Checkpoint, engine: Engine) -> Checkpoint:
    """A checkpoint; of one in speculators format with the names that `eagle-trace export` adds."""
    if trainer_of(checkpoint.config) is None:
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, **second_names(checkpoint.tensors, engine)})


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


def _refuse_others(place: Checkpoint | Reference | None, trainer: Trainer, engine: Engine) -> None:
    if place is None:
        return
    checkpoint = place if isinstance(place, Checkpoint) else place.checkpoint
    folder = checkpoint.folder if checkpoint is not None else Path("the reference")
    refuse_other_types(folder, place.config.get("speculators_model_type", "eagle3"))
    decoder = trainer.training_of(place.config).decoder
    for config in (decoder, place.config):
        _need_numbers(folder, config, engine)


def _trained_ids(
    config: Mapping[str, Any], trainer: Trainer, target: Target | None, recipe: Recipe | None
) -> list[int] | None:
    """The target layers fed in training, by their inputs; None if that is not to be known."""
    layers = target.layers if target else None
    if recipe is not None and recipe.layer_ids:
        ids = list(recipe.layer_ids)
        if trainer.LAYER_IDS != "inputs":
            return named_inputs(trainer, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, target)
        return ids
    if trainer.recognises(config):
        given = config.get("eagle_aux_hidden_state_layer_ids")
        return trained_layer_ids(config, target.folder if target else None) if given or target else None
    named = named_inputs(trainer, config, target)
    return named if named is not None else trainer.default_layers(layers) if layers is not None else None


def named_inputs(trainer: Trainer, config: Mapping[str, Any], target: Target | None) -> list[int] | None:
    """The target layers that a flat config names as the trainer counts them, by their inputs; None if it names none."""
    if trainer.LAYER_IDS == "sglang" and SGLANG.layer_ids(config):
        layers, architecture = (target.layers, target.architecture) if target else (None, None)
        return SGLANG.captured_inputs(config, layers, architecture)
    return outputs_named(config) if trainer.LAYER_IDS != "inputs" else None


def _as_exported(
    checkpoint: Checkpoint, ids: list[int] | None, target: Target | None, engine: Engine
) -> dict[str, Any]:
    config = checkpoint.config
    # ids that cannot be written down are the layer-ids check's to report; any others stand in for them here
    said = ids and engine.ids_that_capture(ids, None, None) is not None
    writable = ids if ids and said else list(range(1, 1 + len(ids or (1, 2, 3))))
    seen: dict[str, Any] = {}
    if target and engine.ids_that_capture(writable, target.layers, target.architecture) is not None:
        seen = {"architectures": [target.architecture], "num_hidden_layers": target.layers}
    served = config_for(engine, config, writable, stored_dtype(checkpoint.tensors) or "float32", seen)
    if ids is None or writable != ids:
        outer, _, key = engine.WORDS.ids_key.rpartition(".")
        if outer:
            served[outer] = dict(served[outer])
        del (served[outer] if outer else served)[key]
        served["num_aux_hidden_states"] = len(writable)
    return served
