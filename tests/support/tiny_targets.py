"""Tiny random targets of many families, each with an EAGLE-3 draft: small, from a seed, saved by the hosts' own code.

Where a published checkpoint looks different from what transformers saves, it is rewritten so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

from eagle_trace.demo import kimi
from tests.support.tiny_speculators import Pair

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, STEPS = 256, 64, 64, 6, 3
#: inputs of layers, as speculators counts
IDS = (2, 3, 4)
IMAGE, VIDEO, VISION_START, VISION_END = 5, 6, 7, 8
#: prompts draw from here on, so that they name no image
FIRST_WORD = 16

Config = dict[str, Any]
BASE: Config = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
_SEEN: Config = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
                 "vision_end_token_id": VISION_END, "tie_word_embeddings": False}  # fmt: skip


def _without(*names: str, **more: Any) -> Config:
    return {key: value for key, value in BASE.items() if key not in names} | more


# ---- configs ---------------------------------------------------------------------------------------------------------


def _deepseek_v3() -> Any:
    rope = kimi.ROPE | {"original_max_position_embeddings": 128}
    latent = kimi.LATENT | {"num_key_value_heads": 4, "rope_parameters": rope}
    return transformers.DeepseekV3Config(**_without("head_dim", **latent))


def _kimi_k25() -> Any:
    return kimi.config(_deepseek_v3(), image_token_id=IMAGE, video_token_id=VIDEO)


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **BASE, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )


def _gpt_oss() -> Any:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0}  # fmt: skip
    types = ["sliding_attention" if n % 2 == 0 else "full_attention" for n in range(LAYERS)]
    own: Config = {"intermediate_size": 64, "sliding_window": 8, "layer_types": types, "rope_parameters": rope}
    return transformers.GptOssConfig(**_without(**own), **_EXPERTS)


def _mistral() -> Any:
    return transformers.MistralConfig(**BASE, sliding_window=None)


def _gemma3_text() -> Any:
    types = ["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(LAYERS)]
    return transformers.Gemma3TextConfig(
        **_without(tie_word_embeddings=True), sliding_window=8, layer_types=types, query_pre_attn_scalar=16
    )


def _gemma3() -> Any:
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
              "image_size": 28, "patch_size": 14, "vision_use_head": False}  # fmt: skip
    return transformers.Gemma3Config(
        text_config=_gemma3_text().to_dict(), vision_config=vision, mm_tokens_per_image=4,
        boi_token_index=VISION_START, eoi_token_index=VISION_END, image_token_index=IMAGE,
    )  # fmt: skip


def _glm4_moe() -> Any:
    return transformers.Glm4MoeConfig(
        **BASE, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, use_qk_norm=True,
        partial_rotary_factor=0.5, num_nextn_predict_layers=0,
    )  # fmt: skip


def _mrope(**more: Any) -> Config:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6, **more}}


def _qwen2_5_vl() -> Any:
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": HIDDEN,
              "fullatt_block_indexes": [0]}  # fmt: skip
    text = _without("head_dim", **_mrope())
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_SEEN)


def _qwen3_vl() -> Any:
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": HIDDEN,
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    text = BASE | _mrope(mrope_interleaved=True)
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_SEEN)


def _llama_tied() -> Any:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128, "rope_theta": 500000.0}  # fmt: skip
    return LlamaConfig(**BASE | {"tie_word_embeddings": True, "rope_parameters": rope})


def _llama4() -> Any:
    text = _without(
        intermediate_size=64, intermediate_size_mlp=128, num_local_experts=4, num_experts_per_tok=1,
        moe_layers=[1, 3, 5], interleave_moe_layer_step=2, attention_chunk_size=256,
    )  # fmt: skip
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256,
              "vision_output_dim": 64, "image_size": 28, "patch_size": 14, "projector_input_dim": 64,
              "projector_output_dim": 64}  # fmt: skip
    return transformers.Llama4Config(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _minimax_m2() -> Any:
    return transformers.MiniMaxM2Config(**_without(intermediate_size=32), **_EXPERTS, rotary_dim=8)


def _glm4() -> Any:
    return transformers.Glm4Config(**BASE, partial_rotary_factor=0.5)


# ---- families --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How a family's tiny target is made and served.

    Attributes:
        config: makes transformers' config.
        architecture: SGLang's class.
        published: keys of every published config that transformers does not save and SGLang reads.
        processor: transformers' processor, image processor and video processor, for a multimodal target.
        centred: its norms add 1 to their weights.
        sglang: arguments it needs on a CPU.
        dtype: the widest dtype that its class computes in.
    """

    config: Callable[[], Any]
    architecture: str
    published: Mapping[str, Any] = field(default_factory=dict)
    processor: tuple[str, ...] = ()
    centred: bool = False
    sglang: tuple[str, ...] = ()
    dtype: str = "float32"


_MINIMAX = {"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
            "shared_intermediate_size": 0}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(_deepseek_v3, "DeepseekV3ForCausalLM", kimi.DEEPSEEK_KEYS),
    "kimi_k25": Family(_kimi_k25, kimi.ARCHITECTURE, processor=("Kimi_K25Processor",), sglang=("--trust-remote-code",)),
    "qwen3_moe": Family(_qwen3_moe, "Qwen3MoeForCausalLM"),
    # the default backend (triton_kernel) has a layout of its own, which is not loaded on a CPU
    "gpt_oss": Family(_gpt_oss, "GptOssForCausalLM", sglang=("--moe-runner-backend", "triton")),
    "mistral": Family(_mistral, "MistralForCausalLM"),
    "gemma3_text": Family(_gemma3_text, "Gemma3ForCausalLM", centred=True),
    "gemma3": Family(
        _gemma3, "Gemma3ForConditionalGeneration", processor=("Gemma3Processor", "Gemma3ImageProcessor"), centred=True
    ),
    "glm4_moe": Family(_glm4_moe, "Glm4MoeForCausalLM"),
    "qwen2_5_vl": Family(
        _qwen2_5_vl,
        "Qwen2_5_VLForConditionalGeneration",
        processor=("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    ),
    "qwen3_vl": Family(
        _qwen3_vl,
        "Qwen3VLForConditionalGeneration",
        processor=("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    ),
    "llama_tied": Family(_llama_tied, "LlamaForCausalLM"),
    "llama4": Family(
        _llama4,
        "Llama4ForConditionalGeneration",
        processor=("Llama4Processor", "Llama4ImageProcessor"),
        dtype="bfloat16",
    ),
    "minimax_m2": Family(_minimax_m2, "MiniMaxM2ForCausalLM", _MINIMAX),
    # no set_eagle3_layers_to_capture: SGLang cannot feed a draft of it
    "glm4": Family(_glm4, "Glm4ForCausalLM"),
}


def write_family(name: str, folder: Path) -> Pair:
    """Write a target of the family `name` and its draft below `folder`; each is a few hundred thousand weights."""
    return Pair(write_family_target(name, folder / "target"), _write_draft(folder / "target", folder / "draft"))


def write_family_target(name: str, folder: Path) -> Path:
    """Write a random float32 target of the family `name`; returns `folder`."""
    family = FAMILIES[name]
    config = family.config()
    config.dtype = torch.float32
    known = type(config) in transformers.AutoModelForCausalLM._model_mapping and not family.processor
    maker = transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = maker.from_config(config, dtype=torch.float32)
        _stir(model, centred=family.centred)
    if name == "kimi_k25":
        kimi.save_as_published(model, folder)
        kimi.write_processor(folder, _tokenizer({IMAGE: kimi.IMAGE_TOKEN, VIDEO: kimi.VIDEO_TOKEN}))
    else:
        model.save_pretrained(folder)
        if name == "gemma3":
            # transformers 5 saves the vision tower without the part that published names have, and SGLang reads
            _rename(folder, "vision_tower.", "vision_tower.vision_model.")
        if family.processor:
            _write_processor(family, folder)
    if family.published:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.published, indent=1))
    return folder


def _rename(folder: Path, old: str, new: str) -> None:
    weights = load_file(folder / "model.safetensors")
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: one for name, one in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _write_draft(target: Path, folder: Path) -> Path:
    config = LlamaConfig(**_without("num_hidden_layers"), num_hidden_layers=1, rms_norm_eps=1e-5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        draft = Eagle3DraftModel.from_training_args(
            config,
            t2d=torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
            d2t=kept - torch.arange(DRAFT_VOCAB),
            draft_vocab_size=DRAFT_VOCAB,
            ttt_steps=STEPS,
            verifier_name_or_path=str(target),
            target_layer_ids=list(IDS),
            draft_attn_impl="eager",
            norm_before_residual=False,
        )
        _stir(draft)
    draft.save_pretrained(folder)
    return folder


def _stir(model: Any, *, centred: bool = False) -> None:
    """Random weights that are not small: noise, around 1 for norms (around 0 for norms that add the 1 themselves)."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_norm = parameter.ndim == 1 and ("norm" in name or "ln" in name) and "bias" not in name
        noise = torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2)
        if is_norm:
            parameter.data = noise if centred else 1.0 + noise
        elif "embed" in name and not centred:
            parameter.data = 8.0 * noise
        elif "experts" in name and parameter.ndim == 3:
            parameter.data = 2.0 * noise
        elif name.endswith(".sinks"):
            # SGLang holds gpt-oss's in bfloat16 whatever the dtype, as they are published
            parameter.data = noise.bfloat16().float()
        else:
            parameter.data = noise
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.data = torch.randn(buffer.shape) * 0.1


def _tokenizer(names: Mapping[int, str], **more: Any) -> Any:
    """A tokenizer of one word for each id: SGLang loads one for every multimodal target."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({names.get(n, f"w{n}"): n for n in range(VOCAB)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w3", bos_token="w0", eos_token="w1", pad_token="w2",
        additional_special_tokens=list(names.values()), **more,
    )  # fmt: skip


#: the words that a family's processor looks up, by the ids of the configs above
_MEDIA_WORDS: dict[str, Mapping[int, str]] = {
    "Gemma3Processor": {IMAGE: "<image_soft_token>", VISION_START: "<start_of_image>", VISION_END: "<end_of_image>"},
    "Llama4Processor": {IMAGE: "<|patch|>", VISION_START: "<|image_start|>", VISION_END: "<|image_end|>"},
}
_QWEN_WORDS = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", VISION_START: "<|vision_start|>",
               VISION_END: "<|vision_end|>"}  # fmt: skip


def _write_processor(family: Family, folder: Path) -> None:
    name, image, *video = family.processor
    words = _MEDIA_WORDS.get(name, _QWEN_WORDS)
    attributes: Config = {}
    if name == "Gemma3Processor":
        attributes = {"image_token": words[IMAGE], "boi_token": words[VISION_START], "eoi_token": words[VISION_END]}
    tokenizer = _tokenizer(words, extra_special_tokens=attributes) if attributes else _tokenizer(words)
    parts = [getattr(transformers, one)() for one in (image, *video)]
    getattr(transformers, name)(parts[0], tokenizer, *parts[1:]).save_pretrained(folder)
