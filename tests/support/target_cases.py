"""Configs of targets as they are published, small, and with what the engine stops at."""

from __future__ import annotations

from typing import Any

from tests.support import checkpoints as make

TEXT = {key: value for key, value in make.decoder_config(make.LAYERS).items() if key != "architectures"}


def flat(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return TEXT | {"architectures": [architecture], "model_type": model_type} | more


def nested(architecture: str, model_type: str, inner: str, key: str = "text_config", **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, key: TEXT | {"model_type": inner} | more}


#: name: (config, the key that the engine stops at or "")
TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (flat("LlamaForCausalLM", "llama"), ""),
    "llama, old keys": (
        {k: v for k, v in flat("LlamaForCausalLM", "llama").items() if k not in ("dtype", "rope_parameters")}
        | {"torch_dtype": "bfloat16", "rope_theta": 500000.0, "rope_scaling": None, "pretraining_tp": 1},
        "",
    ),
    "qwen3": (flat("Qwen3ForCausalLM", "qwen3", sliding_window=None, max_window_layers=30), ""),
    "qwen3-moe": (flat("Qwen3MoeForCausalLM", "qwen3_moe", num_experts=8, decoder_sparse_step=1), ""),
    "phi3": (flat("Phi3ForCausalLM", "phi3", pad_token_id=0, sliding_window=None), ""),
    "gpt-oss": (flat("GptOssForCausalLM", "gpt_oss", swiglu_limit=7.0, num_local_experts=4), ""),
    "mistral": (flat("MistralForCausalLM", "mistral", sliding_window=None), ""),
    "gemma-3": (
        nested("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", final_logit_softcapping=None),
        "",
    ),
    "gemma-3, as transformers saves it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            **{k: v for k, v in TEXT.items() if k not in ("model_type", "hidden_act", "mlp_bias")},
        },
        "",
    ),
    "llama-4": (nested("Llama4ForConditionalGeneration", "llama4", "llama4_text"), ""),
    "null where none is taken": (flat("LlamaForCausalLM", "llama", attention_bias=None), "attention_bias"),
    "integer for a fraction": (flat("Qwen3ForCausalLM", "qwen3", rms_norm_eps=1), "rms_norm_eps"),
    "dtype with its prefix": (flat("LlamaForCausalLM", "llama", dtype="torch.bfloat16"), "dtype"),
    "null in the text's part": (
        nested("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", use_cache=None, initializer_range=None),
        "initializer_range",
    ),
}
