"""Drafts as other projects publish them: right although something about them is unusual, or with one fault.

Judged as the other cases are; see `tensor_cases`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make
from tests.support.tensor_cases import PARTLY, REFUSES, Case, Write, flat, folder, tensors

T = tensors()
IDS = make.kept_ids()
ALL = np.arange(make.VOCABULARY)
HEAD, EMBEDDING = (make.target_tensors()[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
WHOLE = {"draft_vocab_size": make.VOCABULARY}
NO_MAP = tensors("d2t", "t2d", "lm_head.weight")
ATTENTION = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]


def rope(old: bool = False, **settings: Any) -> Write:
    config = {key: value for key, value in flat().items() if key != "rope_parameters"}
    given = {"rope_scaling": settings, "rope_theta": 1e6} if old else {"rope_parameters": settings}
    return folder(config | given, T)


def mapped(**changed: Any) -> Write:
    return folder(flat(), T | changed)


def beside(generation_config: str) -> Write:
    def write(path: Path) -> None:
        make.write_checkpoint(path, flat(), T)
        (path / "generation_config.json").write_text(generation_config)

    return write


def prefixed(prefix: str) -> Write:
    return folder(flat(), {f"{prefix}{name}": value for name, value in T.items()})


def biases(value: float) -> make.Tensors:
    return {f"{one}.bias": np.full(len(T[f"{one}.weight"]), value, ml_dtypes.bfloat16) for one in ATTENTION}


SECTIONS = {"mrope_section": [2, 3, 3]}
OWN_BIAS = {"layers.0.self_attn.o_proj.bias": np.zeros(make.HIDDEN, ml_dtypes.bfloat16)}

PUBLISHED = [
    # ---- rotary embedding
    Case("sections of Qwen2-VL", rope(old=True, type="mrope", **SECTIONS)),
    Case("sections of Qwen2.5-VL", rope(old=True, type="default", rope_type="default", **SECTIONS)),
    Case("sections of Qwen3-VL", rope(rope_type="default", rope_theta=5e6, mrope_interleaved=True, **SECTIONS)),
    Case("Qwen2-VL without sections", rope(old=True, type="mrope"), REFUSES, "config", '"mrope"', "as trained"),
    Case("a share inside the rotary embedding", rope(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5)),
    Case("a share of each head", folder(flat(partial_rotary_factor=0.5), T), warns=("rope",)),
    # ---- beside the config
    Case("a generation config", beside('{"temperature": "hot", "top_k": -5}')),
    Case("a generation config that is not JSON", beside("{")),
    Case(
        "a generation config that is a list",
        beside("[]"),
        REFUSES,
        "config",
        "generation_config.json holds []",
        "delete",
    ),
    # ---- ties
    Case("tied, all ids, no head", folder(flat(tie_word_embeddings=True, **WHOLE), NO_MAP), warns=("tied-head",)),
    Case(
        "tied, all ids, the embedding as head",
        folder(
            flat(tie_word_embeddings=True, **WHOLE),
            NO_MAP | {"lm_head.weight": EMBEDDING, "embed_tokens.weight": EMBEDDING},
        ),
        PARTLY,
    ),
    Case(
        "tied, all ids, another head",
        folder(flat(tie_word_embeddings=True, **WHOLE), NO_MAP | {"lm_head.weight": HEAD}),
        PARTLY,
        "tied-head",
        "is dropped",
        "to false",
    ),
    Case(
        "tied, some ids, no head",
        folder(flat(tie_word_embeddings=True), tensors("lm_head.weight")),
        finding="tied-head",
        words="the target's embedding",
        fix="ship lm_head.weight",
    ),
    # ---- the map between the vocabularies
    Case("all ids, no d2t", folder(flat(**WHOLE), NO_MAP | {"lm_head.weight": HEAD})),
    Case("all ids, d2t of zeros", folder(flat(**WHOLE), NO_MAP | {"lm_head.weight": HEAD, "d2t": 0 * ALL})),
    Case(
        "all ids, d2t of ids",
        folder(flat(**WHOLE), NO_MAP | {"lm_head.weight": HEAD, "d2t": ALL}),
        finding="d2t",
        words="absolute target ids",
        fix="subtract once",
    ),
    Case(
        "all but the padding, no d2t",
        folder(flat(draft_vocab_size=252), NO_MAP | {"lm_head.weight": HEAD[:252]}),
        warns=("d2t",),
    ),
    Case("d2t in int32", mapped(d2t=T["d2t"].astype(np.int32))),
    Case("t2d in int32", mapped(t2d=T["t2d"].astype(np.int32))),
    Case("t2d that was never set", mapped(t2d=0 * T["t2d"])),
    Case("t2d of ones", mapped(t2d=np.ones_like(T["t2d"]))),
    Case("t2d that holds ids", mapped(t2d=IDS)),
    Case("t2d longer than the vocabulary", mapped(t2d=np.append(T["t2d"], np.zeros(64, np.bool_)))),
    Case("d2t in another order", mapped(d2t=IDS[::-1] - np.arange(len(IDS))), warns=("d2t",)),
    # ---- names
    *(
        Case(f"prefix {prefix}", prefixed(prefix), PARTLY, "weight-names", "drops 13", f"the prefix {prefix!r} off")
        for prefix in ("module.", "draft_model.", "eagle_module.")
    ),
    Case(
        "numbered as the target's next layer",
        folder(flat(), {name.replace("layers.0.", "layers.36."): value for name, value in T.items()}),
        PARTLY,
        "weight-names",
        "drops 10",
        "layers.36.self_attn.q_proj.weight -> layers.0.self_attn.q_proj.weight",
    ),
    Case("a step counter beside", mapped(step=np.zeros((), np.int64)), PARTLY),
    Case("an empty tensor beside", mapped(extra=np.zeros((0, 4), np.float32)), PARTLY),
    Case("a number beside", mapped(scale=np.ones((), np.float32)), PARTLY, "weight-names", "scale", "no counterpart"),
    # ---- biases
    Case("biases of zeros", folder(flat(), T | biases(0)), PARTLY),
    Case("biases", folder(flat(), T | biases(1)), PARTLY, "decoder-layer", "drops", "retrain"),
    Case("a bias of zeros that the class wants", folder(flat(attention_bias=True), T | OWN_BIAS)),
    Case(
        "a bias the config asks for",
        folder(flat(attention_bias=True), T),
        PARTLY,
        "weights-present",
        "o_proj.bias",
        "attention_bias to false",
    ),
    # ---- layer ids
    Case(
        "no ids, flag on",
        folder(flat(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}), T),
        finding="layer-ids",
        words="captures no layer",
        fix="name the trained layers",
    ),
]  # fmt: skip
