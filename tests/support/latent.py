"""A small EAGLE-3 draft with latent attention (MLA), from a seed, in the layout that such drafts are published in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import Tensors, write_checkpoint

#: as in every published config of such a draft
YARN: dict[str, Any] = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
ATTENTION = "layers.0.self_attn"


def draft_config(**changes: Any) -> dict[str, Any]:
    """A flat config for a target of 320 tokens, 128 wide; a change to None takes the key out."""
    config: dict[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 128,
        "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": dict(YARN),
        "max_position_embeddings": 512, "vocab_size": 320, "draft_vocab_size": 80, "tie_word_embeddings": False,
        "attention_bias": False, "moe_layer_freq": 1, "dtype": "float32",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def draft_tensors(config: dict[str, Any], seed: int = 5) -> Tensors:
    """Its tensors, float32; the embedding is the target's."""
    draw = np.random.default_rng(seed)
    hidden, middle, heads = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    q_rank, kv_rank, nope, rope, value = (
        config[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    features = len(config["eagle_config"].get("eagle_aux_hidden_state_layer_ids", (1, 2, 3)))
    vocabulary, drafted = config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])

    def matrix(rows: int, columns: int) -> Any:
        return (draw.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm(width: int) -> Any:
        return (1 + 0.2 * draw.standard_normal(width)).astype(np.float32)

    kept = np.sort(draw.permutation(vocabulary)[:drafted])
    tensors = {
        "fc.weight": matrix(hidden, features * hidden),
        f"{ATTENTION}.q_a_proj.weight": matrix(q_rank, 2 * hidden),
        f"{ATTENTION}.q_a_layernorm.weight": norm(q_rank),
        f"{ATTENTION}.q_b_proj.weight": matrix(heads * (nope + rope), q_rank),
        f"{ATTENTION}.kv_a_proj_with_mqa.weight": matrix(kv_rank + rope, 2 * hidden),
        f"{ATTENTION}.kv_a_layernorm.weight": norm(kv_rank),
        f"{ATTENTION}.kv_b_proj.weight": matrix(heads * (nope + value), kv_rank),
        f"{ATTENTION}.o_proj.weight": matrix(hidden, heads * value),
        "layers.0.mlp.gate_proj.weight": matrix(middle, hidden),
        "layers.0.mlp.up_proj.weight": matrix(middle, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, middle),
        "layers.0.input_layernorm.weight": norm(hidden),
        "layers.0.hidden_norm.weight": norm(hidden),
        "layers.0.post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(drafted, hidden),
    }
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{n}.weight": norm(hidden) for n in range(features)}
    if drafted != vocabulary:
        t2d = np.zeros(vocabulary, dtype=np.bool_)
        t2d[kept] = True
        tensors |= {"d2t": kept - np.arange(drafted), "t2d": t2d}
    return tensors


def write_draft(
    folder: Path, edit: Callable[[Tensors], object] = lambda _: None, seed: int = 5, **changes: Any
) -> Path:
    """Write a draft's folder, its tensors edited and its config changed."""
    config = draft_config(**changes)
    tensors = draft_tensors(config, seed)
    edit(tensors)
    return write_checkpoint(folder, config, tensors)
