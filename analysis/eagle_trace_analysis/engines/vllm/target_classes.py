"""Which target classes of vLLM 0.32.0 can feed an EAGLE-3 draft: those with its interface `SupportsEagle3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVES = frozenset({
    "AfmoeForCausalLM", "ApertusForCausalLM", "ClefOmniForJointSchema", "Cohere2MoeForCausalLM",
    "CohereCompassForConditionalGeneration", "Cosmos3ForConditionalGeneration", "DeepseekForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM",
    "Exaone4_5_ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GptOssForCausalLM", "GraniteForCausalLM", "GraniteSWAForCausalLM",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration", "K2HorizonForCausalLM",
    "KimiK25ForConditionalGeneration", "LLaMAForCausalLM", "LagunaForCausalLM",
    "LightOnOCRForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    "LlamaForCausalLM", "LlamaModel", "LlavaForConditionalGeneration", "MiMoForCausalLM",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM", "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration", "MistralForCausalLM",
    "MistralLarge3ForCausalLM", "MistralModel", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3",
    "OpenCUAForConditionalGeneration", "Phi3ForCausalLM", "PixtralForConditionalGeneration",
    "Plamo3ForCausalLM", "Qwen2ForCausalLM", "Qwen2Model", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3ASRRealtimeGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "SarvamMLAForCausalLM", "Step1ForCausalLM",
    "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "TeleFLMForCausalLM",
})  # fmt: skip


def is_known_target(name: str) -> bool:
    """Whether the engine has a class of this name that is known here."""
    return name in SERVES


def feeds_since(name: str) -> str | None:
    """The release from which on a target class feeds EAGLE-3 drafts (empty: as far back as is known); None if none."""
    return "" if name in SERVES else None


def target_class(architectures: Any) -> str | None:
    """The class that serves a target: of those its config names the first that is known here, else the first."""
    names = [name for name in (architectures if isinstance(architectures, list) else ()) if isinstance(name, str)]
    return next((name for name in names if name in SERVES), next(iter(names), None))


def why_it_cannot_serve(name: str, draft: Mapping[str, Any]) -> str | None:  # noqa: ARG001
    """What a target class lacks; of those that are not in `SERVES` nothing is known here."""
    return None
