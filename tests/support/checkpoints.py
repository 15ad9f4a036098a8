"""Healthy small checkpoints on disk, and ways to harm them, for tests of the static check. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

HIDDEN, MIDDLE, HEADS, KEYS, HEAD_DIM = 64, 96, 4, 2, 16
VOCABULARY, DRAFT_VOCABULARY, LAYERS = 256, 96, 30
TRAINED_IDS = [2, 15, 27]

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}


def decoder_config(layers: int) -> dict[str, Any]:
    """A llama config as transformers writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": VOCABULARY,
        "dtype": "bfloat16",
    }


def speculators_config() -> dict[str, Any]:
    """The config of a draft in speculators format."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(TRAINED_IDS),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "dtype": "bfloat16",
        "transformer_layer_config": decoder_config(1),
    }


def kept_ids(seed: int = 0) -> NDArray[np.int64]:
    """Target ids of the draft vocabulary: the first 20 as they are, then some, in runs."""
    rest = np.random.default_rng(seed).permutation(np.arange(21, VOCABULARY))[: DRAFT_VOCABULARY - 20]
    return np.sort(np.concatenate([np.arange(20), rest])).astype(np.int64)


def draft_tensors(ids: NDArray[np.int64] | None = None) -> Tensors:
    """Tensors of a draft by speculators' names, bfloat16, with embedding and head of `target_tensors`."""
    draw = np.random.default_rng(7)
    kept = kept_ids() if ids is None else ids
    target = target_tensors()

    def matrix(rows: int, columns: int) -> NDArray[Any]:
        return (draw.standard_t(5, (rows, columns)) * 0.1).astype(ml_dtypes.bfloat16)

    def norm() -> NDArray[Any]:
        return draw.uniform(0.5, 1.5, HIDDEN).astype(ml_dtypes.bfloat16)

    t2d = np.zeros(VOCABULARY, np.bool_)
    t2d[kept] = True
    return {
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": matrix(KEYS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": matrix(KEYS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": matrix(MIDDLE, HIDDEN),
        "layers.0.mlp.up_proj.weight": matrix(MIDDLE, HIDDEN),
        "layers.0.mlp.down_proj.weight": matrix(HIDDEN, MIDDLE),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        "layers.0.hidden_norm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": target["lm_head.weight"][kept],
        "d2t": kept - np.arange(DRAFT_VOCABULARY),
        "t2d": t2d,
    }


def target_tensors() -> Tensors:
    """Embedding and head of a target; a check reads no more of it."""
    draw = np.random.default_rng(3)
    shape = (VOCABULARY, HIDDEN)
    return {
        "model.embed_tokens.weight": draw.standard_normal(shape).astype(ml_dtypes.bfloat16),
        "lm_head.weight": draw.standard_normal(shape).astype(ml_dtypes.bfloat16),
    }


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """The format by hand: 8 bytes of length, a JSON header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, at = [], 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(raw)],
        }
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Config and weights, in so many shards with an index if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    places = {}
    for shard in range(shards):
        names = list(tensors)[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
