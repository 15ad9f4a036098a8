"""Configs whose rotary embedding is made of odd numbers, for both classes that SGLang serves EAGLE-3 drafts with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support import latent
from tests.support.config_classes import flat_config

ODD = (0.0, -2.0, 0.5, 1.0, 1e-30, 1e-300, 1e39, 1e300, float("nan"), float("inf"), float("-inf"))
#: forms with everything that enters their tables; sizes and lengths are small
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.5, "attn_factor": 1.0, "extrapolation_factor": 1.0,
    },
    "longrope": {
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64,
        "short_mscale": 1.0, "long_mscale": 1.0,
    },
    "deepseek_yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and config of every cell: each number of each form replaced by each odd one, in both classes' configs."""
    for form, settings in FORMS.items():
        for cell, rope in odd_ropes(form, settings):
            yield f"llama, {cell}", flat_config(rope_parameters=rope, max_position_embeddings=256)
            if form != "longrope":
                theta = rope.pop("rope_theta")
                scaling = {"type": rope.pop("rope_type")} | rope if settings else None
                changes = {"rope_theta": theta, "rope_scaling": scaling}
                yield f"latent, {cell}", latent.draft_config(**changes) | {"rope_scaling": scaling}


def odd_ropes(form: str, settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = {"rope_type": form, "rope_theta": 1e4} | settings
    yield form, dict(whole)
    for key in ("rope_theta", *settings):
        for value in ODD:
            # of a list, one number is odd
            held = [*whole[key][:-1], value] if isinstance(whole[key], list) else value
            yield f"{form}, {key} {value:g}", whole | {key: held}
