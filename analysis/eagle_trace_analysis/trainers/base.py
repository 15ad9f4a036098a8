"""What is known of a training from a checkpoint alone, in one form for every trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Training:
    """How a draft was trained.

    Attributes:
        decoder: config of its decoder layer, flat, by transformers' names.
        layer_ids: target layers fed, by their inputs (Hugging Face `hidden_states[i]`); None if the config names none.
        norm_before_residual: the residual stream starts from the normed hidden state.
        norm_before_fc, fc_norm: norms on the target features (all of them together, or each).
        norm_output: the normed stream is carried to the next step.
        own_embedding: the draft trained an embedding of its own.
        draft_vocab_size: tokens the draft can name.
        head_norm: the final norm lies before the head.
    """

    decoder: Mapping[str, Any]
    layer_ids: Sequence[int] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    draft_vocab_size: int
    head_norm: bool = True


@dataclass(frozen=True)
class Folder:
    """What a trainer is told by: nothing that takes reading a weight.

    Attributes:
        config: as it is written.
        names: of the stored tensors.
        files: names of the files that hold them.
        metadata: of the safetensors headers.
    """

    config: Mapping[str, Any]
    names: Collection[str]
    files: Collection[str] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """By what a folder was told to be a trainer's.

    Attributes:
        why: what was seen.
        sure: no other trainer known here leaves that.
    """

    why: tuple[str, ...]
    sure: bool = False


@dataclass(frozen=True)
class Doubt:
    """Something that the trainer does otherwise than its config says.

    Attributes:
        check: the check that says so.
        why: one sentence without a full stop.
        fix: what to do.
        cause: its id, where it is another one than the check's.
        certain: it is so; else it depends on the release, or on what the training was given.
    """

    check: str
    why: str
    fix: str
    cause: str = ""
    certain: bool = False


def flat_training(config: Mapping[str, Any]) -> Training:
    """What a flat config says of the training, where nothing else does; what it does not say is off."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return Training(
        decoder=config,
        layer_ids=None,
        own_embedding=False,
        draft_vocab_size=config.get("draft_vocab_size") or 0,
        **{flag: bool(config.get(flag)) for flag in flags},
    )


class Trainer(Protocol):
    """One trainer: a module of `eagle_trace_analysis.trainers` with these names."""

    @property
    def NAME(self) -> str:
        """What a report calls it."""

    @property
    def TITLE(self) -> str:
        """What a sentence calls it."""

    @property
    def REFERENCE(self) -> str:
        """What of a training to give as a reference, which says how the draft was trained."""

    @property
    def D2T(self) -> str:
        """What its `d2t` holds: ``offsets`` (target id less draft id) or ``ids``."""

    @property
    def FORMS(self) -> Mapping[str, bool]:
        """Settings (names of `Training`) that its class has in one form only, whatever a config says."""

    @property
    def LAYER_IDS(self) -> str:
        """What its layer ids name: ``inputs``, ``outputs``, ``sglang`` (as SGLang's target class reads them)."""

    @property
    def NAMES_LAYERS(self) -> bool:
        """Whether the layers that were fed are those that its config names, or its default; nothing else sets them."""

    @property
    def SPARE_ROWS(self) -> int | None:
        """Rows that its rotary tables have beyond max_position_embeddings; None if they are not tables."""

    def marks(self, folder: Folder) -> Marks | None:
        """By what a folder is told to be the trainer's; None if nothing says so."""

    def doubts(self, config: Mapping[str, Any], theta: float, release: str | None) -> Sequence[Doubt]:
        """What the trainer does otherwise than the flat config of a deployed folder says.

        Args:
            config: as it is deployed.
            theta: the base of the rotary embedding that an engine builds from it.
            release: the trainer's, if it is known.
        """

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's config is in the trainer's format."""

    def training_of(self, config: Mapping[str, Any], release: str | None = None) -> Training:
        """How the draft with this config was trained, by a release of the trainer if that matters.

        Raises:
            CheckpointError: the config describes no decoder.
        """

    def default_layers(self, layers: int) -> list[int]:
        """Target layers fed where the config names none, by their inputs, of a target of `layers` layers."""

    def rope(self, decoder: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """The rotary embedding that was trained, where the decoder's config asks for `asked`."""

    def window(self, decoder: Mapping[str, Any]) -> int | None:
        """Tokens a query saw in training, itself included; None for all."""
