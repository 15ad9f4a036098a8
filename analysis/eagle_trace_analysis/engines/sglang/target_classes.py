"""Which target classes can serve an EAGLE-3 draft: those that give several layers away, and share their embedding.

SGLang's draft worker asks two methods of the target's class: `set_eagle3_layers_to_capture` (unless the draft's config
turns `use_aux_hidden_state` off) and `get_embed_and_head`. Without one of them the server stops before it serves.
`tests/integration/test_engine_judge.py` holds these tables against the installed engine's own registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.engines.sglang import engine


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: classes of SGLang 0.5.23 with both methods
SERVES = _names(
    """
    ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    Cosmos3ForConditionalGeneration DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
    DeepseekV3ForCausalLMNextN EmbeddingGemmaModel ExaoneMoEForCausalLM ExaoneMoEForCausalLMMTP
    ExaoneMoeForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4AssistantForCausalLM
    Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedAssistantForCausalLM
    Gemma4UnifiedForConditionalGeneration Glm4MoeForCausalLM Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLM
    Glm4MoeLiteForCausalLMNextN Glm5NextForConditionalGeneration Glm5NextForConditionalGenerationNextN
    GlmMoeDsaForCausalLM GlmMoeDsaForCausalLMNextN GptOssForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration KimiK25ForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LlamaForCausalLMEagle LlamaForCausalLMEagle3
    LongcatFlashForCausalLM LongcatFlashForCausalLMNextN MellumForCausalLM MindSporeForCausalLM
    MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration
    Ministral3ForCausalLM MistralForCausalLM MistralForCausalLMEagle MistralLarge3ForCausalLM
    MistralLarge3ForCausalLMEagle Phi3ForCausalLM Qwen2ForCausalLM Qwen2ForCausalLMEagle
    Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3MoeForCausalLMMTP
    Qwen3NextForCausalLM Qwen3NextForCausalLMMTP Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SarvamMoEForCausalLM TeleFLMForCausalLM
    """
)
#: classes that came to it later than 0.5.19, with the release
SINCE = {
    "0.5.20": (
        "Cosmos3ForConditionalGeneration",
        "Glm5NextForConditionalGeneration",
        "Glm5NextForConditionalGenerationNextN",
        "Qwen4ExpForConditionalGeneration",
    ),
    "0.5.22": ("ExaoneMoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
}
#: endings of a target's tensors that its class holds in bfloat16, whatever dtype it is served in
HELD_IN_BFLOAT16 = {"GptOssForCausalLM": ".self_attn.sinks"}
#: classes that capture and do not share their embedding: `get_embed_and_head` is missing
NO_EMBEDDING = frozenset({"Qwen2MoeForCausalLM"})
#: the other classes of SGLang 0.5.23: no `set_eagle3_layers_to_capture`
NO_CAPTURE = _names(
    """
    AfmoeForCausalLM ArceeForCausalLM BaichuanForCausalLM BailingMM2NativeForConditionalGeneration
    BailingMMNativeForConditionalGeneration BailingMoeForCausalLMNextN BailingMoeV2_5ForCausalLM
    BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration BeamForCausalLM BertForSequenceClassification
    BertModel CLIPModel ChatGLMModel Cohere2ForCausalLM Cohere2MoeForCausalLM
    Cohere2VisionForConditionalGeneration CohereForCausalLM Contriever Cosmos3EdgeForConditionalGeneration
    DFlash2BeamDraftModel DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM DSparkDraftModel
    DSparkMiniMaxDraftModel DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM
    DeepseekV4ForCausalLM DeepseekV4ForCausalLMDSpark DeepseekV4ForCausalLMNextN DeepseekVL2ForCausalLM
    DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM Dots3NoteForCausalLMNextN DotsOCRForCausalLM
    DotsVLMForCausalLM Eagle3DeepseekV2ForCausalLM EmbeddingGemma2Model Ernie4_5_ForCausalLM
    Ernie4_5_MoeForCausalLM Ernie4_5_MoeForCausalLMMTP Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM
    ExaoneForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM
    GPTJForCausalLM Gemma2ForCausalLM Gemma2ForSequenceClassification Gemma3nForCausalLM
    Gemma3nForConditionalGeneration GemmaForCausalLM GigaChat35ForCausalLM GigaChat35ForCausalLMNextN
    Glm4ForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    GlmAsrForConditionalGeneration GlmImageForConditionalGeneration GlmOcrForConditionalGeneration
    GlmOcrForConditionalGenerationNextN GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM Grok1ForCausalLM
    Grok1ModelForCausalLM HYV3ForCausalLM HYV3ForCausalLMNextN HYV4ForCausalLM HYV4ForCausalLMNextN
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM IQuestLoopCoderForCausalLM
    IQuestQ1ForCausalLM IQuestQ1MTP InklingForConditionalGeneration InklingForConditionalGenerationMTP
    InternLM2ForCausalLM InternLM2ForRewardModel InternS1ForConditionalGeneration InternVLChatModel
    JetNemotronForCausalLM JetVLMForConditionalGeneration K2HorizonForCausalLM KimiK3ForConditionalGeneration
    KimiK3LinearForCausalLM KimiLinearForCausalLM KimiVLForConditionalGeneration LLaDA2MoeModelLM
    LagunaForCausalLM Lfm2BidirectionalModel Lfm2DSparkDraftModel Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm2VlForConditionalGeneration LiLiCorrDraftModel LightOnOCRForConditionalGeneration LingDSparkModel
    LlamaEmbeddingModel LlamaForClassification LlamaForSequenceClassification
    LlamaForSequenceClassificationWithNormal_Weights LlavaForConditionalGeneration LlavaLlamaForCausalLM
    LlavaMistralForCausalLM LlavaQwenForCausalLM LlavaVidForCausalLM LocateAnythingForConditionalGeneration
    Mamba2ForCausalLM MambaForCausalLM MiDashengLMModel MiMoForCausalLM MiMoMTP MiMoV2ASRForCausalLM
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2MTP MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMO
    MiniCPMSALAForCausalLM MiniCPMV MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
    MiniMaxDFlash2DraftModel Mistral3ForConditionalGeneration MistralModel MixtralForCausalLM
    MllamaForConditionalGeneration MossVLForConditionalGeneration MultiModalityCausalLM
    MuseGlimmerAssistantModel MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration
    MuseSparkForConditionalGeneration NVILAForConditionalGeneration NVILALiteForConditionalGeneration
    NanbeigeForCausalLM NanbeigeForSequenceClassification NemotronHForCausalLM NemotronHForCausalLMMTP
    NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
    OPTForCausalLM Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM OrionForCausalLM POINTSV15ChatModel
    PaddleOCRVLForConditionalGeneration PersimmonForCausalLM Phi3SmallForCausalLM Phi4MMForCausalLM
    PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration PixtralVisionModel QWenLMHeadModel
    QuantMixtralForCausalLM Qwen2AudioForConditionalGeneration Qwen2ForRewardModel
    Qwen2ForSequenceClassification Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration
    Qwen3DSparkModel Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model
    Qwen3OmniMoeForConditionalGeneration Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP SDARForCausalLM
    SDARMoeForCausalLM Sarashina2VisionForCausalLM SarvamMLAForCausalLM SolarForCausalLM Spark2_5ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM Step3VLForConditionalGeneration Step3p5ForCausalLM Step3p5MTP
    Step3p7ForConditionalGeneration StepVLForConditionalGeneration TorchNativeLlamaForCausalLM
    TorchNativePhi3ForCausalLM TransformersEmbeddingModel TransformersForCausalLM
    TransformersForSequenceClassification TransformersMoEEmbeddingModel TransformersMoEForCausalLM
    TransformersMoEForSequenceClassification TransformersMultiModalEmbeddingModel
    TransformersMultiModalForCausalLM TransformersMultiModalForSequenceClassification
    TransformersMultiModalMoEEmbeddingModel TransformersMultiModalMoEForCausalLM
    TransformersMultiModalMoEForSequenceClassification UnlimitedOCRForCausalLM VoxtralForConditionalGeneration
    WhisperForConditionalGeneration XLMRobertaForSequenceClassification XLMRobertaModel XllmForCausalLM
    XverseForCausalLM XverseMoeForCausalLM YiVLForCausalLM ZayaForCausalLM
    """
)


def is_known_target(name: str) -> bool:
    """Whether the engine has a class of this name."""
    return name in SERVES or name in NO_EMBEDDING or name in NO_CAPTURE


def feeds_since(name: str) -> str | None:
    """The release from which on a target class feeds EAGLE-3 drafts (empty: as far back as is known); None if none."""
    if name not in SERVES:
        return None
    return next((release for release, names in SINCE.items() if name in names), "")


def target_class(architectures: Any) -> str | None:
    """The class SGLang serves a target with: of those its config names the first that is known here, else the first."""
    names = [name for name in (architectures if isinstance(architectures, list) else ()) if isinstance(name, str)]
    return next((name for name in names if is_known_target(name)), next(iter(names), None))


def why_it_cannot_serve(name: str, draft: Mapping[str, Any]) -> str | None:
    """What the target class `name` lacks to serve the draft with this flat config; None if nothing is known of it."""
    if name in NO_EMBEDDING:
        return "does not share its embedding (it has no get_embed_and_head)"
    if name in NO_CAPTURE and engine.uses_aux_hidden_state(draft):
        return "cannot give away several layers (it has no set_eagle3_layers_to_capture)"
    return None
