"""What is known of a training from a checkpoint alone, in one form for every trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """

    decoder: Mapping[str, Any]
    layer_ids: Sequence[int] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    draft_vocab_size: int


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
    def D2T(self) -> str:
        """What its `d2t` holds: ``offsets`` (target id less draft id) or ``ids``."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's config is in the trainer's format."""

    def training_of(self, config: Mapping[str, Any]) -> Training:
        """How the draft with this config was trained.

        Raises:
            CheckpointError: the config describes no decoder.
        """

    def default_layers(self, layers: int) -> list[int]:
        """Target layers fed where the config names none, by their inputs, of a target of `layers` layers."""

    def rope(self, decoder: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """The rotary embedding that was trained, where the decoder's config asks for `asked`."""

    def window(self, decoder: Mapping[str, Any]) -> int | None:
        """Tokens a query saw in training, itself included; None for all."""
