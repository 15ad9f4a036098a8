"""Which kind of draft a folder holds, told by its tensors: a class name in a config is easily wrong.

The marks were read from the classes that load each kind, `sglang/srt/models/` with `llama_eagle`, `llama_eagle3`,
`dflash`, `dspark`, `*_mtp` and `*_nextn`, and from the exporters of the other projects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.engines import SGLANG, Engine
from eagle_trace_analysis.engines.sglang import engine

Tensors = Mapping[str, StoredTensor]

#: classes of SGLang that load a block-diffusion draft
DFLASH_CLASSES = frozenset(
    {"DFlashDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel", "DFlashLagunaForCausalLM"}
)
NOT_IN_SGLANG = f"{engine.ENGINE} has no class for it"


#: what serves drafts of speculators' other types, by `speculators_model_type`
SPECULATORS_TYPES = {
    "eagle": "SGLang serves an EAGLE-1 head with --speculative-algorithm EAGLE, from a flat config",
    "peagle": f"{NOT_IN_SGLANG}; vLLM serves the folder as it is",
    "dflash": "SGLang serves a DFlash draft with --speculative-algorithm DFLASH, from a flat config",
    "dflash2": "SGLang serves a DFlash draft with --speculative-algorithm DFLASH, from a flat config",
    "dspark": "SGLang serves a DSpark draft with --speculative-algorithm DSPARK, from a flat config",
    "mtp": "SGLang serves native MTP layers with --speculative-algorithm EAGLE, under the class of the target's family",
    "mlp": f"{NOT_IN_SGLANG}; vLLM has one (method mlp_speculator)",
}


@dataclass(frozen=True)
class Kind:
    """What a folder holds if it is not an EAGLE-3 draft of the class this command knows.

    Attributes:
        name: with its article (``an EAGLE-1 or EAGLE-2 head``).
        marks: the tensors by which it was told.
        served: how it is served, if it is.
        fits: whether it is an EAGLE-3 draft all the same, and the config names the class that loads it.
    """

    name: str
    marks: str
    served: str
    fits: bool = False


def refuse_other_types(folder: Path, kind: Any) -> None:
    """Refuse a speculators folder of another `speculators_model_type` than eagle3, with what serves it.

    Raises:
        CheckpointError: it is of another type.
    """
    if kind != "eagle3":
        served = SPECULATORS_TYPES.get(str(kind), "what serves it is not known here")
        raise CheckpointError(f"{folder} is a {kind} speculator, not eagle3: {served}")


def recognise(tensors: Tensors, config: Mapping[str, Any], engine: Engine = SGLANG) -> Kind | None:
    """The kind of draft, or None for an EAGLE-3 draft of `engine.ARCHITECTURE` (or what cannot be told from one).

    Args:
        tensors: by speculators' names (`engine.canonical_name`).
        config: the flat config; read for sizes and class, never for the kind where tensors tell it.
    """
    for look in _LOOKS:
        kind = look(tensors, config)
        if kind is not None:
            return kind
    if is_eagle3(tensors, config) or _architecture(config) in (engine.ARCHITECTURE, None):
        return None
    return Kind(
        "not a draft of a kind known here",
        "no layers.0.hidden_norm, and no first layer that takes embedding and hidden state side by side",
        "give the folder of an EAGLE-3 draft",
    )


def is_eagle3(tensors: Tensors, config: Mapping[str, Any]) -> bool:
    """Whether the first layer is an EAGLE-3 draft's: twice the hidden size enters, or the hidden state has a norm."""
    if "layers.0.hidden_norm.weight" in tensors:
        return True
    entering, hidden = _entering(tensors), hidden_size(tensors, config)
    return entering is not None and entering == 2 * hidden


def hidden_size(tensors: Tensors, config: Mapping[str, Any]) -> int:
    """The draft's width, by a norm of its own if it has one."""
    for name in ("layers.0.post_attention_layernorm.weight", "norm.weight", "layers.0.input_layernorm.weight"):
        stored = tensors.get(name)
        if stored is not None and len(stored.shape) == 1:
            return stored.shape[0]
    return int(engine.with_defaults(config)["hidden_size"])


def _entering(tensors: Tensors) -> int | None:
    """How many numbers enter the first layer's attention, also of one packed in 4 bits; None without any."""
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        for ending in ("weight", "weight_packed", "qweight"):
            stored = tensors.get(f"layers.0.self_attn.{part}.{ending}")
            if stored is None or len(stored.shape) != 2:
                continue
            if ending != "qweight":
                return stored.shape[1] * {"U8": 2, "I32": 8}.get(stored.dtype, 1)
            scales = tensors.get(f"layers.0.self_attn.{part}.scales")
            # GPTQ packs the inputs, AWQ the outputs
            packs_inputs = scales is not None and scales.shape[-1:] == stored.shape[1:]
            return stored.shape[0] * (8 if packs_inputs else 1)
    return None


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _with(tensors: Tensors, pattern: str) -> list[str]:
    found = re.compile(pattern)
    return [name for name in tensors if found.search(name)]


def _adapter(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"\.lora_(A|B|embedding_[AB])\.|\.lora_[AB]$")
    if len(found) < len(tensors):
        return None
    return Kind("a LoRA adapter", f"all tensors are of an adapter ({found[0]}, ...)", "merge it into its draft first")


def _parallel(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"(^|\.)(mask_hidden|mask_embed(ding)?|mask_token_embed(ding)?)(\.weight)?$")
    if not found or not any(name.startswith("fc.") for name in tensors):
        return None
    return Kind(
        "a P-EAGLE draft (all tokens of a draft in one forward)",
        f"there is a {found[0]}",
        f"{NOT_IN_SGLANG}: as an EAGLE-3 draft it would be asked what it was not trained for; vLLM serves it "
        "(method eagle3 with parallel_drafting)",
    )


def _dspark(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"^(markov_head|confidence_head|markov)\.")
    if not found:
        return None
    return Kind("a DSpark draft", f"there is a {found[0]}", "serve with --speculative-algorithm DSPARK")


def _dflash(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    alias = "encoder.fc.weight" in tensors
    top = ("fc.weight" in tensors and "hidden_norm.weight" in tensors) or alias
    if not top or "layers.0.hidden_norm.weight" in tensors or _entering(tensors) == 2 * hidden_size(tensors, config):
        return None
    right = _architecture(config) in DFLASH_CLASSES
    served = "serve with --speculative-algorithm DFLASH"
    if not right:
        served += ', with architectures ["DFlashDraftModel"]'
    return Kind(
        "a DFlash draft (a block of tokens in one forward)", "one hidden_norm behind fc, none in a layer", served
    )


def _medusa(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    hydra = _with(tensors, r"^hydra_(head|mlp|lm_head)")
    if hydra:
        return Kind("Hydra heads", f"there is a {hydra[0]}", NOT_IN_SGLANG)
    found = _with(
        tensors, r"^(medusa_heads?\.|heads\.\d+\.)?\d+\.\d+\.(linear\.)?(weight|bias)$|^medusa|^blocks\.\d+\.layers\."
    )
    if found and not _with(tensors, r"self_attn"):
        return Kind(
            "Medusa heads", f"there is a {found[0]} and no attention", f"{NOT_IN_SGLANG}; vLLM has one (method medusa)"
        )
    mlp = _with(tensors, r"^(speculator\.)?(emb|proj|head)\.\d+\.weight$")
    if len(mlp) >= 3 and not _with(tensors, r"self_attn"):
        return Kind("an MLP speculator", f"there is a {mlp[0]} and no attention",
                    f"{NOT_IN_SGLANG}; vLLM has one (method mlp_speculator)")  # fmt: skip
    return None


def _mtp(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"(^|\.)mtp(_layers|_block)?\.|\.(eh_proj|enorm|hnorm)\.|(^|\.)nextn")
    if not found:
        return None
    whole = _with(tensors, r"(^|\.)layers\.0\.") and len(found) < len(tensors) // 2
    return Kind(
        "a whole model with native MTP layers" if whole else "a native MTP (NEXTN) layer",
        f"there is a {found[0]}",
        "serve with --speculative-algorithm EAGLE (NEXTN is its other name), with the class of the target's family",
    )


def _other_attention(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"^layers\.0\.self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj|fused_qkv_a_proj)")
    if not found or not ("fc.weight" in tensors or "layers.0.hidden_norm.weight" in tensors):
        return None
    return Kind(
        "an EAGLE-3 draft with latent attention (MLA)",
        f"there is a {found[0]}",
        'serve with --speculative-algorithm EAGLE3 and architectures ["Eagle3DeepseekV2ForCausalLM"]; this command '
        f"knows {engine.ARCHITECTURE} only",
        fits=_architecture(config) == "Eagle3DeepseekV2ForCausalLM",
    )


def _eagle1(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    fc, hidden = tensors.get("fc.weight"), hidden_size(tensors, config)
    if fc is None or tuple(fc.shape) != (hidden, 2 * hidden) or is_eagle3(tensors, config):
        return None
    if _entering(tensors) is None and not _with(tensors, r"^layers\.0\."):
        return None
    own = {"qwen2": "Qwen2ForCausalLMEagle", "mistral": "MistralForCausalLMEagle"}.get(
        str(config.get("model_type")), "LlamaForCausalLMEagle"
    )
    return Kind(
        "an EAGLE-1 or EAGLE-2 head",
        f"fc takes embedding and one hidden state ({list(fc.shape)}), and no layer has a hidden_norm",
        f'serve with --speculative-algorithm EAGLE and architectures ["{own}"]',
    )


def _whole(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    ends = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in tensors]
    layers = len({match.group(1) for name in tensors if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))})
    if not ends or not layers or any(name.startswith("fc.") for name in tensors) or is_eagle3(tensors, config):
        return None
    if _entering(tensors) not in (None, hidden_size(tensors, config)) or "d2t" in tensors:
        return None
    return Kind(
        "a whole language model",
        f"{layers} decoder layer{'s' if layers > 1 else ''} that take the embedding alone, and no fc",
        "as a draft of its own it is served with --speculative-algorithm STANDALONE (it needs the target's tokenizer); "
        "if it is the target, give the draft's folder",
    )


_LOOKS: tuple[Callable[[Tensors, Mapping[str, Any]], Kind | None], ...] = (
    _adapter, _medusa, _mtp, _dspark, _parallel, _other_attention, _dflash, _eagle1, _whole,
)  # fmt: skip
