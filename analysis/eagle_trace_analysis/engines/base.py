"""What is known of an engine: the tables and small functions that checks, export and causes read.

An engine is a package of `eagle_trace_analysis.engines` whose names are those of `Engine`. Nothing else has to change
for another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle_trace_analysis.engines.refusal import Refusal
from eagle_trace_analysis.trainers.base import Training

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Gap:
    """Something trained that the engine has no form of.

    Attributes:
        setting: what it is (``norm_before_residual``, ``embedding``, ``decoder``, ``bias``, ``activation``).
        why: one sentence without a full stop.
        fix: what to do.
    """

    setting: str
    why: str
    fix: str


@dataclass(frozen=True)
class Words:
    """What advice calls an engine's options and keys.

    Attributes:
        ids_key: the key of a draft's config that names the target layers.
        counts: what an id is of its layer, ``inputs`` or ``outputs``; a training counts inputs.
        whole_prompts: the fix of a prefill in chunks that goes wrong.
        no_prefix_cache: the option that turns the prefix cache off.
        run_all_drafts: the fix of rows that the draft was not run for near the longest context.
    """

    ids_key: str
    counts: str
    whole_prompts: str
    no_prefix_cache: str
    run_all_drafts: str

    @property
    def name_ids(self) -> str:
        """What to do where no ids are named."""
        return f"name the trained ids{' less one' if self.counts == 'outputs' else ''} in {self.ids_key}"


class Scheme(Protocol):
    """What the engine holds for the matrices of a quantised draft; names of modules are trained ones."""

    @property
    def method(self) -> str:
        """What the engine calls it."""

    @property
    def needed(self) -> Sequence[str]:
        """Endings it must find; without one of them a scale or a matrix keeps its start."""

    @property
    def ignored(self) -> Sequence[str]:
        """Modules that keep their dtype, as the config names them."""

    @property
    def block(self) -> int:
        """Rows that share a scale; each part of a fused matrix must be a multiple of it."""

    def covers(self, module: str) -> bool:
        """Whether the engine takes a module for quantised."""

    def name_of(self, module: str) -> str:
        """What the class calls a matrix, by which it can be excepted."""

    def torn(self) -> Sequence[str]:
        """Fused matrices of which the config excepts some parts and not all."""

    def parts_of(self, place: str) -> Sequence[str]:
        """The matrices that a fused one of `torn` is made of."""


class Engine(Protocol):
    """One engine and a class it serves EAGLE-3 drafts with. Configs are flat; names of tensors are trained ones."""

    @property
    def NAME(self) -> str:
        """What the command line calls it."""

    @property
    def TITLE(self) -> str:
        """What a sentence calls it."""

    @property
    def ENGINE(self) -> str:
        """The same with the release that the tables were read from."""

    @property
    def ARCHITECTURE(self) -> str:
        """The class that serves the draft, as a config has to name it."""

    @property
    def FAMILY(self) -> str:
        """Name of the family that its drafts are of (`eagle_trace.families`)."""

    @property
    def LAYER(self) -> str:
        """What a sentence calls the decoder layer that it computes, with its article."""

    @property
    def LAYER_SIZES(self) -> Sequence[str]:
        """Keys of a config by which the layer's matrices have their shapes."""

    @property
    def MODEL_TYPE(self) -> str:
        """A `model_type` whose config class has the layer's keys."""

    @property
    def ARCHITECTURES(self) -> Collection[str]:
        """Every name of a class that serves such a draft."""

    @property
    def READS(self) -> Collection[str]:
        """Trainers whose format the engine reads as it is."""

    @property
    def REPLACES_EMBEDDING(self) -> bool:
        """Whether a draft of the target's width computes with the target's embedding, whatever it ships."""

    @property
    def OTHER_NAMES(self) -> Mapping[str, Collection[str]]:
        """Names of other engines for a draft with the same layer, which this one does not know: engine -> names."""

    @property
    def WORDS(self) -> Words:
        """What advice calls its options and keys."""

    @property
    def STACKED(self) -> Mapping[str, Sequence[str]]:
        """Parts of each fused parameter, in its order."""

    def other_class(self, config: Config) -> Engine | None:
        """The tables of another class of this engine's, where a draft's config names it; None if these are its."""

    def serves_kind(self, kind: str, config: Config) -> str:
        """What to do so that a draft of another kind is served (`checkpoint.kinds.Kind.id`); empty if it cannot be."""

    def loads_kind(self, kind: str, config: Config) -> bool:
        """Whether the config of an EAGLE-3 draft with another layer names the class that loads it."""

    # ---- the config

    def refusals(self, config: Config) -> Sequence[Refusal]:
        """Keys of a draft's config that the engine stops at."""

    def target_refusals(self, config: Config, text: Config) -> Sequence[Refusal]:
        """Keys of a target's config, and of its text part, that the engine stops at."""

    def repaired(self, config: Config) -> dict[str, Any]:
        """The config without what the engine stops at, so that the rest can be checked."""

    def config_class(self, config: Config) -> Mapping[str, Any] | None:
        """What is known of the config class that `model_type` picks; None if nothing is."""

    def positions(self, config: Config) -> int | None:
        """How many positions a model with this config has."""

    def with_defaults(self, config: Config) -> dict[str, Any]:
        """A decoder config with what the engine fills in where it is silent."""

    def attention_words(self, full: Config) -> str:
        """The sizes of the attention in a config with defaults."""

    def rope_settings(self, config: Config) -> dict[str, Any]:
        """The rotary embedding that the engine builds."""

    def rotation_fault(self, full: Config) -> Refusal | None:
        """Why the rotary embedding of a config with defaults cannot be computed with; None if it can."""

    def norm_before_fc(self, config: Config) -> bool:
        """Whether the concatenated features are normalised before fc."""

    def fc_norm(self, config: Config) -> bool:
        """Whether each feature is normalised before fc."""

    @property
    def SIDE_FILES(self) -> Sequence[str]:
        """Files beside the weights that the engine reads, and that go along with them."""

    def flat_config(self, training: Training, ids: Sequence[int], dtype: str) -> dict[str, Any]:
        """The config that makes the engine serve a draft as it was trained, with `ids` as `ids_that_capture` gives."""

    # ---- what is fed

    def uses_aux_hidden_state(self, config: Config) -> bool:
        """Whether several target layers are captured for this draft."""

    def num_aux_hidden_states(self, config: Config) -> int:
        """How many target layers fc is built for."""

    def fed_width(self, config: Config) -> int:
        """Width of what the draft is fed, by its config alone."""

    def skips_fc(self, config: Config) -> bool:
        """Whether fc and the norms before it are left out."""

    def layer_ids(self, config: Config) -> Any:
        """The layer ids that the engine reads from a config, as they stand there; None if it names none."""

    def ids_unread(self, config: Config) -> str:
        """Which form of the engine does not read the ids that `layer_ids` finds, in a clause; empty if all do."""

    def default_inputs(self, layers: int) -> list[int]:
        """Target layers whose inputs are fed where the config names none."""

    def captured_inputs(self, config: Config, layers: int | None, target: str | None) -> list[int] | None:
        """Target layers whose inputs are fed; None if that is not to be known."""

    def ids_that_capture(self, inputs: Sequence[int], layers: int | None, target: str | None) -> list[int] | None:
        """The ids to write so that the inputs of these layers are fed; None if no list does it."""

    def copied_from_serving(self, ids: Sequence[int], layers: int | None, target: str | None) -> int | None:
        """Whether ids of a training look like a serving config's, copied: the number of layers they fit, or None."""

    def copied_from_training(self, ids: Sequence[int]) -> int | None:
        """Whether ids of a serving config look like a training's, copied: the number of layers they fit, or None."""

    def last_input(self, layers: int, target: str | None) -> int:
        """The last layer of the target whose input can be fed."""

    # ---- the weights

    def parameters(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what the class holds."""

    def canonical_name(self, name: str) -> str:
        """The trained name of a stored tensor."""

    def destinations(self, name: str, known: Collection[str]) -> tuple[str, ...]:
        """The parameters that a stored tensor is loaded into; none if it is dropped."""

    def entering_norm(self, name: str) -> str | None:
        """The engine's own name of the norm that a later layer starts with; None for any other tensor."""

    def computes_nothing(self, name: str) -> bool:
        """Whether a dropped tensor is missed by nothing."""

    def layer_of(self, name: str) -> int | None:
        """The decoder layer a stored tensor belongs to."""

    def gaps(self, training: Training) -> list[Gap]:
        """What of a training the engine has no form of: the one list of it."""

    # ---- quantisation

    def read_quantisation(self, folder: Path, config: Config) -> Mapping[str, Any] | None:
        """What the engine finds said of a draft's quantisation; None if nothing.

        Raises:
            CheckpointError: it cannot be read.
        """

    def quantisation_refused(self, said: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why the engine does not start with it, and the way out."""

    def scheme_of(self, said: Mapping[str, Any]) -> Scheme | str:
        """What the engine then holds, or why that is not known here."""

    # ---- the target

    def target_class(self, architectures: Any) -> str | None:
        """The class that serves a target which names these."""

    def why_it_cannot_serve(self, name: str, draft: Config) -> str | None:
        """What a target class lacks to feed the draft; None if nothing is known of it."""

    def is_known_target(self, name: str) -> bool:
        """Whether the engine has a target class of this name."""

    def feeds_since(self, name: str) -> str | None:
        """The release from which on a target class feeds EAGLE-3 drafts (empty: always); None if it feeds none."""
