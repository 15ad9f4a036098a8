"""Faults of drafts with latent attention, one entry a fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.latent import ATTENTION, YARN
from tests.support.plant_edits import drop, fresh, put, rename, without
from tests.support.planted import Planted

HEALTHY = [Planted("healthy", None, None), Planted("position-offset", None, None, serve={"shift": 1})]
ROPE, CONTEXT = "layer.0.attn.q_rope", "layer.0.attn.context"
LATENT_NORM, EXPAND = f"{ATTENTION}.kv_a_layernorm.weight", f"{ATTENTION}.kv_b_proj.weight"
LATENTS = f"{ATTENTION}.kv_a_proj_with_mqa.weight"
#: what else is rightly confirmed: the scores are scaled by yarn's factor as well
BESIDES = {"yarn-factor": ("softmax-scale",)}
#: factor on the scores without YaRN's part
BARE = 32**-0.5


def moved(name: str, order: Any) -> Any:
    """Rows of a matrix in another order."""
    return lambda held: held.update({name: np.ascontiguousarray(held[name][order(len(held[name]))])})


def values_before_keys(count: int) -> Any:
    """kv_b_proj with each head's part for values before that for keys (4 heads of 16 and 24)."""
    heads = np.arange(count).reshape(4, 40)
    return np.concatenate([heads[:, 16:], heads[:, :16]], axis=1).reshape(-1)


def key_before_latent(count: int) -> Any:
    """kv_a_proj_with_mqa with the 16 rows of the key before those of the latent."""
    return np.roll(np.arange(count), 16)


def faults() -> list[Planted]:
    """Every fault: the cause that should be confirmed, and where the sides part first."""
    twice = dict(YARN, factor=8.0)
    return [
        Planted("rope-theta", "rope-theta", ROPE, config=put("rope_theta", value=10000.0), serve={"theta": 10000.0}),
        Planted("rope-theta-of-the-engine", "rope-theta", ROPE, serve={"theta": 20000.0}),
        Planted(
            "yarn-range",
            "rope-theta",
            ROPE,
            config=put("rope_scaling", "original_max_position_embeddings", value=256),
            serve={"yarn": dict(YARN, original_max_position_embeddings=256)},
        ),
        Planted(
            "yarn-not-applied-to-the-rotation",
            "rope-theta",
            ROPE,
            serve={"yarn": None, "scale": BARE * (0.1 * np.log(4.0) + 1) ** 2},
        ),
        Planted("yarn-factor", "rope-theta", ROPE, config=put("rope_scaling", value=twice), serve={"yarn": twice}),
        Planted(
            "rope-halves", "rope-layout", ROPE, config=put("rope_interleave", value=False), serve={"layout": "half"}
        ),
        Planted("softmax-scale-without-yarn", "softmax-scale", CONTEXT, serve={"scale": BARE}),
        Planted(
            "softmax-scale-deployed",
            "softmax-scale",
            CONTEXT,
            config=put("rope_scaling", value=dict(YARN, mscale=0.5, mscale_all_dim=0.5)),
            serve={"yarn": dict(YARN, mscale=0.5, mscale_all_dim=0.5)},
        ),
        Planted("softmax-scale-of-the-engine", "softmax-scale", CONTEXT, serve={"scale": 0.31}),
        Planted(
            "norm-eps", "norm-eps", "layer.0.embed_norm", config=put("rms_norm_eps", value=1e-2), serve={"eps": 1e-2}
        ),
        Planted("norm-eps-of-the-latents", "norm-eps", "layer.0.attn.q_a_norm", serve={"latent_eps": 1e-3}),
        Planted(
            "latent-norm-dropped",
            "weights-dropped",
            "layer.0.attn.kv_a_norm",
            stored=rename(LATENT_NORM, f"{ATTENTION}.kv_norm.weight"),
            serve_tensors=lambda held: held.update({LATENT_NORM: np.ones(32)}),
            serve_write={"dropped": [f"{ATTENTION}.kv_norm.weight"], "shipped": without(LATENT_NORM)},
        ),
        Planted(
            "expansion-missing",
            "weights-missing",
            CONTEXT,
            stored=drop(EXPAND),
            serve_tensors=fresh(EXPAND),
            serve_write={"shipped": without(EXPAND)},
        ),
        Planted(
            "values-before-keys",
            "weights-differ",
            CONTEXT,
            stored=moved(EXPAND, values_before_keys),
            serve_tensors=moved(EXPAND, values_before_keys),
        ),
        Planted(
            "key-before-latent",
            "weights-differ",
            "layer.0.attn.kv_a",
            stored=moved(LATENTS, key_before_latent),
            serve_tensors=moved(LATENTS, key_before_latent),
        ),
        Planted("sliding-window", "sliding-window", CONTEXT, serve={"window": 24}),
        Planted("kv-cached-prefix", "kv-cached-prefix", CONTEXT, serve={"prefix": (10, 1.5)}),
        Planted(
            "single-layer",
            "single-layer-features",
            "fused",
            serve={"pick": lambda s: s[-1]},
            config=put("eagle_config", "use_aux_hidden_state", value=False),
        ),
        Planted(
            "carry-norm",
            "carry-norm",
            "carry",
            trained=put("norm_output", value=True),
            config=put("norm_output", value=False),
            train={"norm_output": True},
        ),
    ]
