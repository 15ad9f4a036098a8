"""The shape of a draft with latent attention, as its config has it; what its class cannot compute is refused by name.

The keys and their defaults are those of transformers' `DeepseekV3Config`, which servers read such a config with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_training.config import LARGEST, refuse_first
from eagle_trace_training.published import Published, beyond_one_layer

#: names of the one scaling that the class computes
YARN = ("yarn", "deepseek_yarn")


@dataclass(frozen=True)
class Yarn:
    """YaRN as DeepSeek computes it (arXiv:2309.00071, and DeepSeek-V3's `modeling_deepseek.py`).

    Attributes:
        factor: how much longer texts may be than those that were trained first.
        original: length of those.
        fast, slow: rotations within `original` above which a frequency stays, and below which it is divided.
        mscale, mscale_all_dim: of the factors on the rotated part, and on all of the scores.
    """

    factor: float
    original: float
    fast: float = 32.0
    slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def grown(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def on_rotation(self) -> float:
        """Factor on cosines and sines."""
        return self.grown(self.mscale) / self.grown(self.mscale_all_dim)


@dataclass(frozen=True)
class Shape:
    """What a draft's forward needs to know beside its weights.

    Attributes:
        vocabulary, draft_vocabulary: ids that are fed, and ids that are scored.
        hidden, intermediate: width of the stream, and of the MLP.
        target: width of one target layer.
        features: how many target layers are fed.
        heads: of the attention.
        q_rank, kv_rank: width of the latents.
        nope, rope, value: per head: unrotated and rotated part of queries and keys, and values.
        eps: added to the mean square in every norm.
        theta: base of the rotary frequencies.
        yarn: their scaling, None for none.
        interleaved: neighbours are rotated together; else the two halves.
        fc_bias: fc has a bias.
        fc_norm: each target layer is normed before fc.
        norm_output: the normed stream is carried to the next step.
        tied: the head is the embedding.
    """

    vocabulary: int
    draft_vocabulary: int
    hidden: int
    intermediate: int
    target: int
    features: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    eps: float = 1e-6
    theta: float = 10000.0
    yarn: Yarn | None = None
    interleaved: bool = True
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    tied: bool = False

    @property
    def scale(self) -> float:
        """Factor on the scores: 1 / sqrt(width of a query), and with YaRN the square of what the rotation lacks."""
        grown = self.yarn.grown(self.yarn.mscale_all_dim) if self.yarn is not None else 1.0
        return float((self.nope + self.rope) ** -0.5 * grown * grown)


def shape_of(found: Published) -> Shape:
    """The shape of a published draft.

    Raises:
        CheckpointError: a number is missing, or the class computes no such draft.
    """
    config = found.config
    vocabulary = found.number("vocab_size")
    drafted = found.number("draft_vocab_size", vocabulary)
    _check(found, vocabulary, drafted)
    hidden = found.number("hidden_size")
    target = found.number("target_hidden_size", hidden)
    shape = Shape(
        vocabulary=vocabulary,
        draft_vocabulary=drafted,
        hidden=hidden,
        intermediate=found.number("intermediate_size"),
        target=target,
        features=_features(found, hidden, target),
        heads=found.number("num_attention_heads"),
        q_rank=found.number("q_lora_rank"),
        kv_rank=found.number("kv_lora_rank"),
        nope=found.number("qk_nope_head_dim"),
        rope=_even(found, "qk_rope_head_dim"),
        value=found.number("v_head_dim"),
        eps=_real(config, "rms_norm_eps", 1e-6),
        theta=_theta(found),
        yarn=_yarn(found),
        interleaved=bool(config.get("rope_interleave", True)),
        fc_bias=bool(config.get("bias", False)),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if not 0 < shape.scale <= LARGEST or (shape.yarn is not None and not 0 < shape.yarn.on_rotation <= LARGEST):
        raise CheckpointError(
            f"rope_scaling in the config of {found.folder} makes a factor that is no number of float32, on the "
            f"rotation or on the scores ({shape.scale:g})"
        )
    return shape


def _check(found: Published, vocabulary: int, drafted: int) -> None:
    """Raises CheckpointError for the first thing that the class does not compute."""
    config = found.config
    # as transformers' class reads them, whose default is for an absent key alone
    nulls = [key for key in ("rms_norm_eps", "rope_theta", "tie_word_embeddings") if config.get(key, 0) is None]
    refused = [
        (nulls, f"has null for {', '.join(nulls)}, which is not for want of a value"),
        *beyond_one_layer(found, (*YARN, "default")),
        (config.get("num_hidden_layers", 1) != 1, f"counts {config.get('num_hidden_layers')} layers, not one"),
        (config.get("hidden_act", "silu") != "silu", f"activates by {config.get('hidden_act')!r}, not silu"),
        *((config.get(key), f"has {key}, where the class has none") for key in ("attention_bias", "mlp_bias")),
        (
            config.get("tie_word_embeddings") and drafted != vocabulary,
            f"has tie_word_embeddings on, so that its head is the target's embedding of {vocabulary:,} rows, and a "
            f"draft vocabulary of {drafted:,} ids (set tie_word_embeddings to false, and ship lm_head.weight)",
        ),
    ]
    refuse_first(found.folder, refused, ": the reference forward does not compute such a draft")


def _features(found: Published, hidden: int, target: int) -> int:
    """How many target layers fc takes; the tensor says it, since no config can make another forward of it."""
    fc = found.state.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[0] != hidden or fc.shape[1] % target:
        seen = "has no fc.weight" if fc is None else f"has an fc.weight of {list(fc.shape)}"
        raise CheckpointError(f"{found.folder} {seen}: an EAGLE-3 draft has [{hidden}, layers x {target}]")
    return int(fc.shape[1] // target)


def _theta(found: Published) -> float:
    own, rope = found.config.get("rope_theta"), found.rope.get("rope_theta")
    theta = float(own if own is not None else rope if rope is not None else 10000.0)
    if theta <= 1:
        # YaRN divides by its logarithm
        raise CheckpointError(f"rope_theta in the config of {found.folder} is {theta!r}, not a number above 1")
    return theta


def _yarn(found: Published) -> Yarn | None:
    given = found.rope
    if given["rope_type"] not in YARN:
        return None
    # as transformers fills it in: one beside the parameters comes first
    most = _real(found.config, "max_position_embeddings", 4096.0)
    length = "original_max_position_embeddings"
    beside = found.config if found.config.get(length) is not None else given
    return Yarn(
        factor=_real(given, "factor", 1.0),
        original=_real(beside, length, most),
        fast=_real(given, "beta_fast", 32.0),
        slow=_real(given, "beta_slow", 1.0),
        mscale=_real(given, "mscale", 1.0),
        mscale_all_dim=_real(given, "mscale_all_dim", 0.0),
    )


def _real(given: Mapping[str, Any], name: str, default: float) -> float:
    """A number of a config that was judged (`eagle_trace_training.config`)."""
    value = given.get(name)
    return float(default if value is None else value)


def _even(found: Published, name: str) -> int:
    value = found.number(name)
    if value % 2:
        raise CheckpointError(f"{name} in the config of {found.folder} is {value}, which does not split in two halves")
    return value
