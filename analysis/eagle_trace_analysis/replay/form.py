"""The form of a draft's forward: everything that is not a weight, as its training config says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.engines import SGLANG, Engine
from eagle_trace_analysis.trainers import Trainer, trainer_of
from eagle_trace_analysis.trainers.base import flat_training

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Attributes:
        theta: base of the frequencies.
        kind: ``default``, ``linear``, ``llama3`` or ``yarn`` (transformers' names), or ``deepseek_yarn``, which is yarn
            with DeepSeek's factor on cosines and sines.
        partial: share of the head that is rotated.
        parameters: what else `kind` needs, by transformers' names.
        interleaved: rotate neighbouring elements instead of the two halves of a head.
        rounded: what of the tables was rounded to bfloat16 before they were computed: ``""`` for nothing,
            ``frequencies``, or ``angles`` for frequencies, positions and their products.
    """

    theta: float = 10000.0
    kind: str = "default"
    partial: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    rounded: str = ""

    def angles(self, positions: NDArray[np.integer[Any]], head_dim: int) -> tuple[Float64, float] | None:
        """Angles of some positions [T, rotated / 2], and the factor on cos and sin; None for a kind not known here."""
        found = self.frequencies(head_dim)
        if found is None:
            return None
        frequency, place = found[0][None, :], positions[:, None].astype(np.float64)
        if self.rounded:
            frequency = _bfloat16(frequency)
        if self.rounded == "angles":
            return _bfloat16(_bfloat16(place) * frequency), found[1]
        return place * frequency, found[1]

    def frequencies(self, head_dim: int) -> tuple[Float64, float] | None:
        """Angles per position [rotated / 2] and the factor on cos and sin; None for a kind not known here.

        Formulas as in transformers' `modeling_rope_utils`.
        """
        rotated = int(head_dim * self.partial)
        base = self.theta ** (-np.arange(0, rotated, 2) / rotated)
        if self.kind == "default":
            return base, 1.0
        if self.kind == "linear":
            return base / float(self.parameters.get("factor", 1.0)), 1.0
        if self.kind == "llama3":
            return _llama3(base, self.parameters), 1.0
        if self.kind == "yarn":
            return _yarn(base, rotated, self.theta, self.parameters)
        if self.kind == "deepseek_yarn":
            given = self.parameters
            return _yarn(base, rotated, self.theta, given)[0], grown(given, "mscale", 1.0) / grown(
                given, "mscale_all_dim", 0.0
            )
        return None

    def words(self) -> str:
        """In a few words."""
        kind = "DeepSeek's yarn" if self.kind == "deepseek_yarn" else self.kind
        text = f"theta {self.theta:g}" + ("" if kind == "default" else f", {kind}")
        text += f" x {self.parameters['factor']:g}" if "factor" in self.parameters else ""
        if self.kind == "deepseek_yarn" and "original_max_position_embeddings" in self.parameters:
            text += f" from {self.parameters['original_max_position_embeddings']} tokens"
        text += "" if self.partial == 1 else f", {self.partial:g} of each head"
        text += f", {self.rounded} rounded to bfloat16" if self.rounded else ""
        return text + (", interleaved" if self.interleaved else "")


def _bfloat16(values: Float64) -> Float64:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _llama3(base: Float64, given: Mapping[str, Any]) -> Float64:
    factor, low, high = (float(given[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    old = float(given["original_max_position_embeddings"])
    wave = 2 * math.pi / base
    smooth = (old / wave - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    return np.where(wave < old / high, base, np.where(wave > old / low, base / factor, between))


def _yarn(base: Float64, rotated: int, theta: float, given: Mapping[str, Any]) -> tuple[Float64, float]:
    factor = float(given.get("factor", 1.0))
    old = float(given.get("original_max_position_embeddings", 4096))

    def place(rotations: float) -> float:
        return rotated * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(place(float(given.get("beta_fast", 32)))), 0)
    high = min(math.ceil(place(float(given.get("beta_slow", 1)))), rotated - 1)
    ramp = np.clip((np.arange(len(base)) - low) / ((high - low) or 1e-3), 0, 1)
    scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return base / factor * ramp + base * (1 - ramp), float(given.get("attention_factor") or scale)


def grown(given: Mapping[str, Any], name: str, default: float) -> float:
    """0.1 m ln(factor) + 1 with m the parameter of that name, as DeepSeek-V3's `modeling_deepseek.py` has it."""
    factor = float(given.get("factor", 1.0))
    return 0.1 * float(given.get(name, default)) * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one latent per token.

    Attributes:
        rank: width of the latent.
        nope: the part of each query and key that is not rotated.
        value: width of each head's value.
    """

    rank: int
    nope: int
    value: int


@dataclass(frozen=True)
class Form:
    """What a draft's forward does with its weights.

    Attributes:
        eps: added to the mean square in every norm.
        rope: rotary embedding.
        heads, kv_heads, head_dim: of the attention; with a latent, one key is there for all heads, and `head_dim` is
            the part of each head that is rotated.
        latent: what else latent attention has; None for another one.
        scale: factor on the scores; None for 1 / sqrt(head_dim).
        norm_before_residual: the residual stream starts from the normed hidden state.
        norm_before_fc, fc_norm: norms on the target features (all of them together, or each).
        norm_output: the normed stream is carried to the next step.
        head_norm: the head reads the normed stream.
        norm_offset: norms scale by 1 + w instead of w.
        window: tokens a query sees, itself included; None for all.
        layer_ids: target layers fed, by their inputs (Hugging Face `hidden_states[i]`); None if not named.
        target_width: width of one target layer.
    """

    eps: float
    rope: Rope
    heads: int
    kv_heads: int
    head_dim: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_norm: bool = True
    norm_offset: bool = False
    window: int | None = None
    layer_ids: tuple[int, ...] | None = None
    target_width: int = 0
    latent: Latent | None = None
    scale: float | None = None

    @property
    def on_scores(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


#: scalings that need the length that was trained first
_OF_A_LENGTH = ("llama3", "yarn", "longrope", "deepseek_yarn")


def rope_of(config: Mapping[str, Any], engine: Engine = SGLANG, trainer: Trainer | None = None) -> Rope:
    """The rotary embedding of a decoder config, as the engine builds it or, given a trainer, as it was trained."""
    settings = engine.rope_settings(config)
    if trainer is not None:
        settings = trainer.rope(config, settings)
    known = ("rope_theta", "rope_type", "partial_rotary_factor", "rope_interleave")
    rest = {key: value for key, value in settings.items() if key not in known}
    kind, theta = str(settings["rope_type"]), float(settings["rope_theta"])
    if kind in _OF_A_LENGTH or (kind != "default" and config.get("kv_lora_rank") is not None):
        # as transformers fills it in: one beside the parameters comes first
        rest.setdefault("original_max_position_embeddings", config.get("max_position_embeddings") or 4096)
        if (beside := config.get("original_max_position_embeddings")) is not None:
            rest["original_max_position_embeddings"] = beside
    return Rope(theta, kind, float(settings["partial_rotary_factor"]), rest)


def form_of(config: Mapping[str, Any], engine: Engine = SGLANG) -> Form:
    """The form of a draft's config, a trainer's or a server's (flat).

    Raises:
        CheckpointError, KeyError, TypeError, ValueError: the config does not describe a decoder.
    """
    trainer = trainer_of(config)
    if trainer is not None:
        training = trainer.training_of(config)
        layer, ids = engine.with_defaults(training.decoder), training.layer_ids
        window = trainer.window(layer)
    else:
        training = replace(
            flat_training(config),
            norm_before_residual=False,
            norm_before_fc=engine.norm_before_fc(config),
            fc_norm=engine.fc_norm(config),
        )
        layer, ids, window = engine.with_defaults(config), engine.captured_inputs(config, None, None), None
    form = Form(
        eps=float(layer["rms_norm_eps"]),
        # the next two are what a trainer was seen to do; no config that is deployed says it
        rope=replace(rope_of(layer, engine, trainer), rounded=str(config.get("rope_rounded") or "")),
        head_norm=config.get("head_norm") is not False,
        heads=int(layer["num_attention_heads"]),
        kv_heads=int(layer["num_key_value_heads"]),
        head_dim=int(layer["head_dim"]),
        norm_before_residual=training.norm_before_residual,
        norm_before_fc=training.norm_before_fc,
        fc_norm=training.fc_norm,
        norm_output=training.norm_output,
        window=window,
        layer_ids=tuple(int(i) for i in ids) if ids else None,
        target_width=int(config.get("target_hidden_size") or layer["hidden_size"]),
    )
    return form if layer.get("kv_lora_rank") is None else _with_latent(form, layer)


def _with_latent(form: Form, layer: Mapping[str, Any]) -> Form:
    """The form of latent attention, whose class takes every scaling of the rotation for its own yarn."""
    latent = Latent(*(int(layer[name]) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")))
    rotated = int(layer["qk_rope_head_dim"])
    rope = replace(form.rope, partial=1.0, interleaved=layer.get("rope_interleave") is not False)
    scale = (latent.nope + rotated) ** -0.5
    if rope.kind != "default":
        rope = replace(rope, kind="deepseek_yarn")
        scale *= grown(rope.parameters, "mscale_all_dim", 0.0) ** 2
    return replace(form, rope=rope, kv_heads=1, head_dim=rotated, latent=latent, scale=scale, norm_before_fc=False)
