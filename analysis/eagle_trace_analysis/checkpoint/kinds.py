"""Which kind of draft a folder holds, told by its tensors: a class name in a config is easily wrong.

The marks were read from the classes that load each kind, `sglang/srt/models/` with `llama_eagle`, `llama_eagle3`,
`dflash`, `dspark`, `*_mtp` and `*_nextn`, and from the exporters of the other projects. How a kind is served is the
engine's to say (`Engine.serves_kind`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import class_names
from eagle_trace.errors import CheckpointError
from eagle_trace.families import EAGLE3_MLA
from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.engines import ENGINES, SGLANG, Engine

Tensors = Mapping[str, StoredTensor]

#: what latent attention takes the entering rows with
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")

#: speculators' other types (`speculators_model_type`), as kinds
SPECULATORS_TYPES = {
    "eagle": "eagle1", "peagle": "peagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "mtp": "mtp",
    "mlp": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a folder holds if it is not an EAGLE-3 draft of the class this command knows.

    Attributes:
        id: by which an engine knows it.
        name: with its article (``an EAGLE-1 or EAGLE-2 head``).
        marks: the tensors by which it was told.
        advice: what to do with it whatever the engine; empty if that is the engine's to say.
    """

    id: str
    name: str
    marks: str
    advice: str = ""


def how_served(kind: str, config: Mapping[str, Any], engine: Engine) -> str:
    """How an engine serves a kind of draft, or which other one does."""
    own = engine.serves_kind(kind, config)
    if own:
        return own
    others = [
        f"{other.TITLE} has one: {said}"
        for other in ENGINES.values()
        if other is not engine and (said := other.serves_kind(kind, config))
    ]
    as_eagle3 = "; as an EAGLE-3 draft it would be asked what it was not trained for" if kind == "peagle" else ""
    return f"{engine.ENGINE} has no class for it{as_eagle3}{'; ' if others else ''}{'; '.join(others)}"


def refuse_other_types(folder: Path, kind: Any, engine: Engine = SGLANG) -> None:
    """Refuse a speculators folder of another `speculators_model_type` than eagle3, with what serves it.

    Raises:
        CheckpointError: it is of another type.
    """
    if kind == "eagle3":
        return
    known = SPECULATORS_TYPES.get(str(kind))
    served = f"for {engine.TITLE}, {how_served(known, {}, engine)}" if known else "what serves it is not known here"
    flat = (
        ", from a flat config" if known and "speculators" not in engine.READS and engine.serves_kind(known, {}) else ""
    )
    raise CheckpointError(f"{folder} is a {kind} speculator, not eagle3: {served}{flat}")


def recognise(tensors: Tensors, config: Mapping[str, Any], engine: Engine = SGLANG) -> Kind | None:
    """The kind of draft, or None for an EAGLE-3 draft of the engine's class (or what cannot be told from one).

    Args:
        tensors: by speculators' names (`engine.canonical_name`).
        config: the flat config; read for sizes and class, never for the kind where tensors tell it.
        engine: what is to serve it, with the tables of the class that the config names.
    """
    looks: tuple[_Look, ...] = (*_BEFORE_ATTENTION, partial(_other_attention, engine), *_BEHIND_ATTENTION)
    for look in looks:
        kind = look(tensors, config)
        if kind is not None:
            return kind
    if is_eagle3(tensors, config) or _architecture(config) in (*engine.ARCHITECTURES, None):
        return None
    return Kind(
        "unknown",
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
    return int(SGLANG.with_defaults(config)["hidden_size"])


def _entering(tensors: Tensors) -> int | None:
    """How many numbers enter the first layer's attention, also of one packed in 4 bits; None without any."""
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", *LATENT):
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
    return next(iter(class_names(config)), None)


def _with(tensors: Tensors, pattern: str) -> list[str]:
    found = re.compile(pattern)
    return [name for name in tensors if found.search(name)]


def _adapter(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"\.lora_(A|B|embedding_[AB])\.|\.lora_[AB]$")
    if len(found) < len(tensors):
        return None
    marks = f"all tensors are of an adapter ({found[0]}, ...)"
    return Kind("adapter", "a LoRA adapter", marks, "merge it into its draft first")


def _parallel(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"(^|\.)(mask_hidden|mask_embed(ding)?|mask_token_embed(ding)?)(\.weight)?$")
    if not found or not any(name.startswith("fc.") for name in tensors):
        return None
    return Kind("peagle", "a P-EAGLE draft (all tokens of a draft in one forward)", f"there is a {found[0]}")


def _dspark(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"^(markov_head|confidence_head|markov)\.")
    if not found:
        return None
    return Kind("dspark", "a DSpark draft", f"there is a {found[0]}")


def _dflash(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    alias = "encoder.fc.weight" in tensors
    top = ("fc.weight" in tensors and "hidden_norm.weight" in tensors) or alias
    if not top or "layers.0.hidden_norm.weight" in tensors or _entering(tensors) == 2 * hidden_size(tensors, config):
        return None
    marks = "one hidden_norm behind fc, none in a layer"
    return Kind("dflash", "a DFlash draft (a block of tokens in one forward)", marks)


def _medusa(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    hydra = _with(tensors, r"^hydra_(head|mlp|lm_head)")
    if hydra:
        return Kind("hydra", "Hydra heads", f"there is a {hydra[0]}")
    found = _with(
        tensors, r"^(medusa_heads?\.|heads\.\d+\.)?\d+\.\d+\.(linear\.)?(weight|bias)$|^medusa|^blocks\.\d+\.layers\."
    )
    if found and not _with(tensors, r"self_attn"):
        return Kind("medusa", "Medusa heads", f"there is a {found[0]} and no attention")
    mlp = _with(tensors, r"^(speculator\.)?(emb|proj|head)\.\d+\.weight$")
    if len(mlp) >= 3 and not _with(tensors, r"self_attn"):
        return Kind("mlp", "an MLP speculator", f"there is a {mlp[0]} and no attention")
    return None


def _mtp(tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    found = _with(tensors, r"(^|\.)mtp(_layers|_block)?\.|\.(eh_proj|enorm|hnorm)\.|(^|\.)nextn")
    if not found:
        return None
    whole = _with(tensors, r"(^|\.)layers\.0\.") and len(found) < len(tensors) // 2
    name = "a whole model with native MTP layers" if whole else "a native MTP (NEXTN) layer"
    return Kind("mtp", name, f"there is a {found[0]}")


def _other_attention(engine: Engine, tensors: Tensors, _: Mapping[str, Any]) -> Kind | None:
    """An EAGLE-3 draft with another attention than that of the class which its config names."""
    if not ("fc.weight" in tensors or "layers.0.hidden_norm.weight" in tensors):
        return None
    found = _with(tensors, rf"^(model\.)?layers\.0\.self_attn\.({'|'.join(LATENT)}|kv_b_proj|fused_qkv_a_proj)")
    if EAGLE3_MLA.name != engine.FAMILY:
        name = "an EAGLE-3 draft with latent attention (MLA)"
        return Kind("latent", name, f"there is a {found[0]}") if found else None
    other = _with(tensors, r"^layers\.0\.self_attn\.(qkv|q|k|v)_proj\.")
    if found or not other:
        return None
    return Kind("llama", "an EAGLE-3 draft with a llama layer", f"there is a {other[0]}")


def _eagle1(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    fc, hidden = tensors.get("fc.weight"), hidden_size(tensors, config)
    if fc is None or tuple(fc.shape) != (hidden, 2 * hidden) or is_eagle3(tensors, config):
        return None
    if _entering(tensors) is None and not _with(tensors, r"^layers\.0\."):
        return None
    marks = f"fc takes embedding and one hidden state ({list(fc.shape)}), and no layer has a hidden_norm"
    return Kind("eagle1", "an EAGLE-1 or EAGLE-2 head", marks)


def _whole(tensors: Tensors, config: Mapping[str, Any]) -> Kind | None:
    ends = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in tensors]
    layers = len({match.group(1) for name in tensors if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))})
    if not ends or not layers or any(name.startswith("fc.") for name in tensors) or is_eagle3(tensors, config):
        return None
    if _entering(tensors) not in (None, hidden_size(tensors, config)) or "d2t" in tensors:
        return None
    marks = f"{layers} decoder layer{'s' if layers > 1 else ''} that take the embedding alone, and no fc"
    return Kind("whole", "a whole language model", marks)


_Look = Callable[[Tensors, Mapping[str, Any]], Kind | None]
_BEFORE_ATTENTION: tuple[_Look, ...] = (_adapter, _medusa, _mtp, _dspark, _parallel)
_BEHIND_ATTENTION: tuple[_Look, ...] = (_dflash, _eagle1, _whole)
