"""Small drafts of other kinds than EAGLE-3, by the tensors their own projects save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make

H, M, V = make.HIDDEN, make.MIDDLE, make.VOCABULARY
Draft = tuple[dict[str, Any], make.Tensors]


def matrix(*shape: int) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(sum(shape))
    return (draw.standard_t(5, shape) * 0.1).astype(ml_dtypes.bfloat16)


def block(prefix: str = "layers.0.", entering: int = H, norms: bool = True) -> make.Tensors:
    """A decoder layer that takes `entering` numbers."""
    queries, keys = make.HEADS * make.HEAD_DIM, make.KEYS * make.HEAD_DIM
    shapes = {
        "self_attn.q_proj": (queries, entering),
        "self_attn.k_proj": (keys, entering),
        "self_attn.v_proj": (keys, entering),
        "self_attn.o_proj": (H, queries),
        "mlp.gate_proj": (M, H),
        "mlp.up_proj": (M, H),
        "mlp.down_proj": (H, M),
    }
    if norms:
        shapes |= {"input_layernorm": (H,), "post_attention_layernorm": (H,)}  # type: ignore[dict-item]
    return {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return make.decoder_config(1) | {"architectures": [architecture]} | more


def eagle1(architecture: str = "LlamaForCausalLMEagle", **more: Any) -> Draft:
    stored = block(norms=False) | {
        "layers.0.post_attention_layernorm.weight": matrix(H),
        "fc.weight": matrix(H, 2 * H),
        "embed_tokens.weight": matrix(V, H),
    }
    return config(architecture, **more), stored


def eagle1_with_bias() -> Draft:
    made, stored = eagle1("LlamaForCausalLMEagle3", bias=True, draft_vocab_size=V)
    return made, stored | {"fc.bias": matrix(H)}


def dflash(architecture: str = "DFlashDraftModel", **more: np.ndarray[Any, Any]) -> Draft:
    stored = (
        block()
        | block("layers.1.")
        | {"fc.weight": matrix(H, 3 * H), "hidden_norm.weight": matrix(H), "norm.weight": matrix(H)}
    )
    stored |= {"layers.0.self_attn.q_norm.weight": matrix(make.HEAD_DIM)}
    return config(architecture, num_hidden_layers=2, block_size=16), stored | more


def eagle3(architecture: str, prefix: str = "layers.0.", **more: np.ndarray[Any, Any]) -> Draft:
    stored = {name.replace("layers.0.", prefix): value for name, value in make.draft_tensors().items()}
    return config(architecture, draft_vocab_size=make.DRAFT_VOCABULARY), stored | more


def latent() -> Draft:
    stored = {name: value for name, value in make.draft_tensors().items() if ".self_attn." not in name}
    stored |= {f"layers.0.self_attn.{one}.weight": matrix(32, 2 * H) for one in ("q_a_proj", "kv_a_proj_with_mqa")}
    return config("LlamaForCausalLMEagle3", draft_vocab_size=make.DRAFT_VOCABULARY), stored


def medusa() -> Draft:
    heads = {
        f"{head}.0.linear.{part}": matrix(*shape)
        for head in range(3)
        for part, shape in (("weight", (H, H)), ("bias", (H,)))
    }
    return config("MedusaModel"), heads | {f"{head}.1.weight": matrix(V, H) for head in range(3)}


def hydra() -> Draft:
    return config("HydraModel"), {
        "hydra_head.0.0.linear.weight": matrix(H, 2 * H),
        "hydra_lm_head.0.weight": matrix(V, H),
    }


def mlp_speculator() -> Draft:
    found = {}
    for n in range(3):
        found |= {f"emb.{n}.weight": matrix(V, H), f"proj.{n}.weight": matrix(H, H), f"head.{n}.weight": matrix(V, H)}
    return config("MLPSpeculatorPreTrainedModel"), found


def native(prefix: str) -> Draft:
    stored = block(f"{prefix}.", H) | {f"{prefix}.{one}.weight": matrix(H) for one in ("enorm", "hnorm")}
    return config("DeepseekV3ForCausalLMNextN"), stored | {f"{prefix}.eh_proj.weight": matrix(H, 2 * H)}


def qwen_mtp() -> Draft:
    stored = block("mtp.layers.0.") | {"mtp.fc.weight": matrix(H, 2 * H), "mtp.norm.weight": matrix(H)}
    return config("Qwen3NextForCausalLMMTP"), stored


def whole(layers: int = 3, prefix: str = "model.", architecture: str = "LlamaForCausalLM", tied: bool = False) -> Draft:
    stored: make.Tensors = {}
    for index in range(layers):
        stored |= block(f"{prefix}layers.{index}.")
    stored |= {f"{prefix}embed_tokens.weight": matrix(V, H), f"{prefix}norm.weight": matrix(H)}
    if not tied:
        stored["lm_head.weight"] = matrix(V, H)
    return config(architecture, num_hidden_layers=layers, tie_word_embeddings=tied), stored


def whole_with_mtp() -> Draft:
    made, stored = whole(8)
    return made, stored | {"model.layers.8.eh_proj.weight": matrix(H, 2 * H), "model.layers.8.enorm.weight": matrix(H)}


def adapter() -> Draft:
    base = "base_model.model.layers.0.mlp.up_proj"
    return config("LlamaForCausalLMEagle3"), {
        f"{base}.lora_A.weight": matrix(4, H),
        f"{base}.lora_B.weight": matrix(M, 4),
    }


#: name: (the draft, what it is called, how it is said to be served)
KINDS: dict[str, tuple[Callable[[], Draft], str, str]] = {
    "EAGLE-1": (
        eagle1,
        "EAGLE-1 or EAGLE-2 head",
        '--speculative-algorithm EAGLE and architectures ["LlamaForCausalLMEagle"]',
    ),
    "EAGLE-1 of Qwen2": (lambda: eagle1("Qwen2ForCausalLM", model_type="qwen2"), "EAGLE-1", "Qwen2ForCausalLMEagle"),
    "EAGLE-1 called EAGLE-3": (eagle1_with_bias, "EAGLE-1", "--speculative-algorithm EAGLE and"),
    "DFlash": (dflash, "DFlash", "--speculative-algorithm DFLASH"),
    "DFlash under the target's class": (
        lambda: dflash("Qwen3ForCausalLM"),
        "DFlash",
        'architectures ["DFlashDraftModel"]',
    ),
    "DFlash called EAGLE-3": (lambda: dflash("LlamaForCausalLMEagle3"), "DFlash", "DFLASH"),
    "DSpark": (
        lambda: dflash("DSparkDraftModel", **{"markov_head.markov_w1.weight": matrix(V, 8)}),
        "DSpark",
        "DSPARK",
    ),
    "P-EAGLE": (lambda: eagle3("PEagleDraftModel", mask_hidden=matrix(1, H)), "P-EAGLE", "no class for it"),
    "P-EAGLE called EAGLE-3": (
        lambda: eagle3("LlamaForCausalLMEagle3", mask_hidden=matrix(1, 3 * H)),
        "P-EAGLE",
        "vLLM",
    ),
    "MLA": (latent, "latent attention", "Eagle3DeepseekV2ForCausalLM"),
    "Medusa": (medusa, "Medusa", "no class for it"),
    "Hydra": (hydra, "Hydra", "no class for it"),
    "MLP speculator": (mlp_speculator, "MLP speculator", "no class for it"),
    "NEXTN": (lambda: native("model.layers.61"), "MTP", "--speculative-algorithm EAGLE (NEXTN"),
    "NEXTN alone": (lambda: native("layers.0"), "MTP", "NEXTN"),
    "MTP of Qwen": (qwen_mtp, "MTP", "NEXTN"),
    "model with MTP": (whole_with_mtp, "whole model with native MTP", "NEXTN"),
    "whole model": (whole, "whole language model", "STANDALONE"),
    "whole tied model": (lambda: whole(1, tied=True), "whole language model", "STANDALONE"),
    "whole model called EAGLE-3": (
        lambda: whole(1, "", "LlamaForCausalLMEagle3"),
        "whole language model",
        "STANDALONE",
    ),
    "LoRA adapter": (adapter, "LoRA adapter", "merge"),
    "nothing known": (
        lambda: (config("SomeModel"), {"encoder.weight": matrix(H, H)}),
        "not a draft of a kind",
        "EAGLE-3",
    ),
}
