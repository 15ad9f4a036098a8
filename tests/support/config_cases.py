"""Configs of a flat draft that are wrong, refused or merely unusual: for the check, and for the engine as judge."""

from __future__ import annotations

from typing import Any

from tests.support.check_cases import Harm, eagle, setting

#: name, harm, and the finding: its name, its cause, words of its evidence and of its fix
FLAT_FAULTS: list[tuple[str, Harm, str, str, str, str]] = [
    (
        "aux off",
        eagle(use_aux_hidden_state=False),
        "aux-hidden-state",
        "single-layer-features",
        "fc is skipped",
        "true",
    ),
    (
        "ids copied",
        eagle(eagle_aux_hidden_state_layer_ids=[2, 15, 27]),
        "layer-ids",
        "layer-ids-shifted",
        "[3, 16, 28]",
        "[1, 14, 26]",
    ),
    (
        "ids past the end",
        eagle(eagle_aux_hidden_state_layer_ids=[1, 14, 29]),
        "layer-ids",
        "layer-ids-shifted",
        "not distinct layers",
        "distinct",
    ),
    ("tied", setting(tie_word_embeddings=True), "tied-head", "lm-head-tied", "dropped", "false"),
    (
        "no draft vocabulary",
        lambda c, _: c.__delitem__("draft_vocab_size"),
        "vocabulary",
        "lm-head-from-target",
        "not set",
        "96",
    ),
    (
        "theta",
        setting(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "rope",
        "rope-theta",
        "10000.0",
        "100000.0",
    ),
    (
        "scaling lost",
        setting(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}),
        "rope",
        "rope-theta",
        "factor is 2.0",
        "rope_parameters",
    ),
    ("eps", setting(rms_norm_eps=1e-6), "norm-eps", "norm-eps", "1e-06", "1e-05"),
    ("max position", setting(max_position_embeddings=2048), "max-position", "max-position", "2048", "4096"),
    ("activation", setting(hidden_act="gelu"), "decoder-layer", "weights-dropped", "gelu", "silu"),
    ("norm output", setting(norm_output=True), "norm-output", "carry-norm", "true", "false"),
    ("fc norm on", setting(fc_norm=True), "fc-norm", "fc-norm-ignored", "without it", "false"),
    (
        "architecture",
        setting(architectures=["LlamaForCausalLM"]),
        "format",
        "",
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
    ),
    (
        "target width null",
        setting(target_hidden_size=None),
        "fc-width",
        "single-layer-features",
        "null",
        "remove",
    ),
    (
        "head shape",
        setting(num_attention_heads=8, head_dim=8, num_key_value_heads=4),
        "head-shape",
        "qkv-order",
        "is 8",
        "trained",
    ),
]

LINEAR = {"rope_type": "linear", "rope_theta": 1e5}

#: what is changed, what the finding says of it, how to mend it
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"attention_bias": None}, "attention_bias is null, but LlamaConfig takes true or false", "remove attention_bias"),
    ({"mlp_bias": None}, "mlp_bias is null", "remove mlp_bias"),
    ({"hidden_act": None}, "hidden_act is null, but LlamaConfig takes a string", "remove hidden_act"),
    ({"use_cache": None}, "use_cache is null", "remove use_cache"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is null", "remove tie_word_embeddings"),
    ({"initializer_range": None}, "initializer_range is null", "remove initializer_range"),
    ({"initializer_range": 1}, "takes a number with a fraction", "set initializer_range to 1.0"),
    ({"initializer_range": 1.5}, "not within 0 and 1", "0.02"),
    ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps is "1e-5"', "a number with a fraction"),
    ({"use_cache": 1}, "use_cache is 1", "true or false"),
    ({"max_position_embeddings": 4096.0}, "max_position_embeddings is 4096.0", "to 4096"),
    ({"pad_token_id": [0]}, "pad_token_id is [0]", "an integer"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0", "to 64"),
    ({"num_attention_heads": "4"}, 'num_attention_heads is "4"', "an integer"),
    ({"draft_vocab_size": "96"}, 'draft_vocab_size is "96"', "as trained"),
    ({"torch_dtype": "torch.bfloat16", "dtype": None}, 'torch_dtype is "torch.bfloat16"', 'to "bfloat16"'),
    ({"dtype": "bf16"}, 'dtype is "bf16"', 'to "bfloat16"'),
    ({"dtype": "auto"}, 'dtype is "auto"', 'to "bfloat16"'),
    ({"model_type": "llama3"}, 'model_type is "llama3", which transformers does not know', '"llama"'),
    ({"model_type": None}, "model_type is null", '"llama"'),
    ({"layer_types": ["full_attention"] * 2}, "names 2 layers, num_hidden_layers says 1", "remove layer_types"),
    ({"layer_types": ["fancy"]}, "not a list of attention types", "remove layer_types"),
    ({"rope_scaling": [1]}, "rope_scaling is [1]", "remove rope_scaling"),
    ({"rope_parameters": LINEAR}, "has no factor", "rope_parameters.factor"),
    ({"rope_parameters": LINEAR | {"factor": 8}}, "wants a number with a fraction", "to 8.0"),
    ({"rope_parameters": LINEAR | {"factor": 8.0, "rope_theta": "1e5"}}, 'rope_theta is "1e5"', "as trained"),
    ({"rope_parameters": {"rope_type": "su"}}, 'the rotary embedding "su"', "rope_parameters"),
    ({"partial_rotary_factor": None}, "partial_rotary_factor is null", "remove"),
    ({"auto_map": None}, "auto_map is null", "remove auto_map"),
    ({"text_config": None}, "text_config is null", "remove text_config"),
    ({"eagle_config": "x"}, 'eagle_config is "x"', "remove eagle_config"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2"}}, "not a list of layer ids", "list of integers"),
    ({"num_labels": None}, "num_labels is null", "remove num_labels"),
    ({"model_max_length": "long"}, "counts no positions", "remove model_max_length"),
]

ACCEPTED: list[dict[str, Any]] = [
    *({key: None} for key in ("pretraining_tp", "pad_token_id", "rope_scaling", "head_dim",
                              "quantization_config", "bos_token_id", "attention_dropout", "per_layer_config")),
    {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    {"unknown_key": None, "transformers_version": None, "return_dict": None},
    {"dtype": None, "torch_dtype": "bfloat16"},
    {"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"},
    {"pad_token_id": -1, "eos_token_id": [1, 2]},
    {"attention_dropout": 0},
]  # fmt: skip

#: model types of other families, with everything named that their classes would choose otherwise
NAMED = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}

#: model types that compute a llama layer otherwise though everything is named: the finding, and its words
OTHERWISE = {
    "qwen3_next": ("decoder-layer", "rope_theta 10000.0 (llama 100000.0)"),
    "phi": ("decoder-layer", "partial_rotary_factor 0.5"),
    "glm4": ("decoder-layer", "partial_rotary_factor 0.5"),
    "glm4_moe": ("decoder-layer", "partial_rotary_factor 0.5"),
    "stablelm": ("decoder-layer", "partial_rotary_factor 0.25"),
    "deepseek_v2": ("config", "takes head_dim 64 whatever the config says"),
    "llama4_text": ("head-shape", "16384"),
}
