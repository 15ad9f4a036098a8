"""A tiny Kimi-K2.5: its config, tensor names and processor as the published checkpoint has them.

transformers writes a Kimi-K2.5 in its own way; SGLang's `KimiK25ForConditionalGeneration` reads the published one:
other tensor names, a flat vision config, `kimi_k2` as the kind of the text model, and a processor that comes as code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.demo import models_dir

if TYPE_CHECKING:
    from collections.abc import Mapping


ARCHITECTURE = "KimiK25ForConditionalGeneration"
IMAGE_TOKEN, VIDEO_TOKEN = "<|media_pad|>", "<|kimi_k25_video_placeholder|>"

#: multi-head latent attention and experts, smaller than anywhere
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
ROPE: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 50000.0,
}  # fmt: skip
#: in every published config of DeepSeek's kin; transformers does not save them, SGLang reads them without a default
DEEPSEEK_KEYS: dict[str, Any] = {
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0, "ep_size": 1,
    "moe_layer_freq": 1,
}  # fmt: skip
#: where transformers 5.19 does not find the way back to the names it reads
_RENAMED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
_VISION_WIDTH = 32


def config(text: Any, *, image_token_id: int, video_token_id: int) -> Any:
    """transformers' config of a Kimi-K2.5 around the text config `text` (a DeepSeek-V3's)."""
    from transformers import Kimi_K25Config

    vision = {
        "hidden_size": _VISION_WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": _VISION_WIDTH, "pos_emb_height": 8, "pos_emb_width": 8,
    }  # fmt: skip
    return Kimi_K25Config(
        text_config=text.to_dict(),
        vision_config=vision,
        projection_hidden_size=_VISION_WIDTH,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
        vision_start_token_id=image_token_id,
        vision_end_token_id=image_token_id,
        tie_word_embeddings=False,
    )


def save_as_published(model: Any, folder: Path) -> Path:
    """Save transformers' model of a Kimi-K2.5 as the published checkpoint looks; returns `folder`."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(published_config(json.loads(path.read_text("utf-8"))), indent=2), encoding="utf-8")
    weights = {_published_name(name): one for name, one in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


def published_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of the published checkpoint says, of the one that transformers saves."""
    text = dict(saved["text_config"])
    rope = dict(text.pop("rope_parameters"))
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
        **DEEPSEEK_KEYS,
    }
    seen = saved["vision_config"]
    width, layers, heads = seen["hidden_size"], seen["num_hidden_layers"], seen["num_attention_heads"]
    vision = {
        "patch_size": seen["patch_size"], "init_pos_emb_height": seen["pos_emb_height"],
        "init_pos_emb_width": seen["pos_emb_width"], "init_pos_emb_time": seen["pos_emb_time"],
        "pos_emb_height": seen["pos_emb_height"], "pos_emb_width": seen["pos_emb_width"],
        "pos_emb_time": seen["pos_emb_time"], "pos_emb_type": "divided_fixed",
        "num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": width,
        "intermediate_size": seen["intermediate_size"], "vt_num_attention_heads": heads,
        "vt_num_hidden_layers": layers, "vt_hidden_size": width, "vt_intermediate_size": seen["intermediate_size"],
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger", "mm_hidden_size": width, "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5, "text_hidden_size": text["hidden_size"],
    }  # fmt: skip
    return dict(saved) | {
        "architectures": [ARCHITECTURE],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": saved["image_token_id"],
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
    }


def _published_name(name: str) -> str:
    old = next((old for old in _RENAMED if name.startswith(old)), "")
    return _RENAMED.get(old, "") + name.removeprefix(old)


def write_processor(folder: Path, tokenizer: Any) -> None:
    """Write the processor beside the model: SGLang loads one for every multimodal target, for text as well."""
    from transformers import Kimi_K25ImageProcessor, Kimi_K25Processor, Kimi_K25VideoProcessor

    made = Kimi_K25Processor(Kimi_K25ImageProcessor(), tokenizer, Kimi_K25VideoProcessor())
    made.save_pretrained(folder)
    # the published checkpoint brings its processor as code, of which SGLang reads `media_processor.media_proc_cfg`
    code = models_dir() / "kimi" / "target" / "processing_tiny.py"
    (folder / code.name).write_bytes(code.read_bytes())
    path = folder / "processor_config.json"
    named = json.loads(path.read_text("utf-8")) | {"auto_map": {"AutoProcessor": "processing_tiny.TinyProcessor"}}
    path.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
