"""A tiny target and EAGLE-3 draft on disk, in the format SGLang loads, for tests that need no sense in text.

Nothing is trained, but the two are related, so that some drafts are accepted and some are not. Every word has
a successor, and both models tend to continue a word with it: the target against the noise of its random
layers, the draft because its one attention layer looks at the row's own token and little else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a llama; the names are those of the Hugging Face config."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 384
    max_position_embeddings: int = 2048


#: Words have their embedding in these leading channels; the other channels carry noise only.
WORD_CHANNELS = 64
#: Ids of the target layers whose outputs the draft reads, in SGLang's convention (output of layer i).
AUX_LAYER_IDS = (1, 3, 4)
DRAFT_VOCAB_SIZE = 320


def write_tiny_target(folder: Path, shape: TinyShape = TinyShape(), *, seed: int = 0, noise: float = 0.8) -> Path:
    """Writes ``config.json`` and float32 weights of a ``LlamaForCausalLM``; returns ``folder``.

    Args:
        noise: how much each random layer adds to the residual stream; without any, words follow a fixed
            order.
    """
    draw = _Draw(seed)
    embedding = torch.zeros(shape.vocab_size, shape.hidden_size)
    embedding[:, :WORD_CHANNELS] = draw.matrix(shape.vocab_size, WORD_CHANNELS, std=1.0)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(shape.hidden_size)}
    for layer in range(shape.num_hidden_layers):
        weights |= _layer(draw, f"model.layers.{layer}", shape, noise)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(shape.hidden_size)
    weights["lm_head.weight"] = embedding.roll(1, dims=0) / shape.hidden_size**0.5
    return _save(folder, weights, {"architectures": ["LlamaForCausalLM"], **_config(shape)})


def write_tiny_draft(folder: Path, target: Path, shape: TinyShape = TinyShape(), *, seed: int = 1) -> Path:
    """Writes an EAGLE-3 draft, with a vocabulary of its own, for a target of the same ``shape``."""
    shape = replace(shape, num_hidden_layers=1)
    draw = _Draw(seed)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    kept = draw.permutation(shape.vocab_size)[:DRAFT_VOCAB_SIZE].sort().values
    hidden = shape.hidden_size
    weights = {
        "fc.weight": draw.matrix(hidden, 3 * hidden, std=(3 * hidden) ** -0.5),
        "norm.weight": torch.ones(hidden),
        # Blurred, so that the right word is at times the draft's second or third choice, as trees want it.
        "lm_head.weight": head[kept] + draw.matrix(DRAFT_VOCAB_SIZE, hidden, std=1.8 * hidden**-0.5),
        "d2t": kept - torch.arange(DRAFT_VOCAB_SIZE),
        **_layer(draw, "midlayer", shape, noise=0.3),
        **_attention_to_own_token("midlayer.self_attn", shape),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
        },
        **_config(shape),
    }
    return _save(folder, weights, config)


class _Draw:
    """Random weights that depend on a seed and nothing else."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, *, std: float) -> Tensor:
        return std * torch.randn(rows, columns, generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator)


def _layer(draw: _Draw, name: str, shape: TinyShape, noise: float) -> dict[str, Tensor]:
    hidden, mlp = shape.hidden_size, shape.intermediate_size
    query, cached = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        f"{name}.self_attn.q_proj.weight": draw.matrix(query, hidden, std=2 * hidden**-0.5),
        f"{name}.self_attn.k_proj.weight": draw.matrix(cached, hidden, std=hidden**-0.5),
        f"{name}.self_attn.v_proj.weight": draw.matrix(cached, hidden, std=hidden**-0.5),
        f"{name}.self_attn.o_proj.weight": draw.matrix(hidden, query, std=noise * query**-0.5),
        f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{name}.mlp.gate_proj.weight": draw.matrix(mlp, hidden, std=hidden**-0.5),
        f"{name}.mlp.up_proj.weight": draw.matrix(mlp, hidden, std=hidden**-0.5),
        f"{name}.mlp.down_proj.weight": draw.matrix(hidden, mlp, std=noise * mlp**-0.5),
    }


def _attention_to_own_token(name: str, shape: TinyShape) -> dict[str, Tensor]:
    """Weights over (token embedding, hidden state) that replace what was carried by the row's own word."""
    hidden, width = shape.hidden_size, WORD_CHANNELS
    heads_share = shape.num_attention_heads // shape.num_key_value_heads
    word = torch.eye(width, 2 * hidden)
    carried = torch.eye(width, hidden)
    per_head = word.view(shape.num_key_value_heads, shape.head_dim, 2 * hidden)
    out = torch.zeros(hidden, shape.num_key_value_heads, heads_share, shape.head_dim)
    # One query head of each group writes; the channels of the heads are the word channels in order.
    out[:width, :, 0] = torch.eye(width).view(width, shape.num_key_value_heads, shape.head_dim)
    return {
        # Equal queries and keys score highest on the row itself: the sharper, the less of the context is
        # mixed in.
        f"{name}.q_proj.weight": 1.5 * per_head.repeat_interleave(heads_share, dim=0).reshape(-1, 2 * hidden),
        f"{name}.k_proj.weight": 1.5 * word,
        f"{name}.v_proj.weight": word - torch.cat([torch.zeros(width, hidden), carried], dim=1),
        f"{name}.o_proj.weight": out.reshape(hidden, -1),
    }


def _config(shape: TinyShape) -> dict[str, object]:
    return {
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def _save(folder: Path, weights: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
