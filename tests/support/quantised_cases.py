"""Quantised drafts as the tools that make them write them, and how they go wrong; see `tensor_cases`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support import checkpoints as make
from tests.support.quantised_forms import (
    FP8,
    METHODS,
    PROJECTIONS,
    fp8,
    fp8_block,
    fp8_rows,
    fp8_static,
    gptq,
    int8_rows,
    quantised,
)
from tests.support.tensor_cases import FINE, PARTLY, REFUSES, Case, Write, flat, folder, tensors


def as_method(name: str, stored: make.Tensors | None = None, **changes: Any) -> Write:
    config, form, beside = METHODS[name]
    stored = quantised(form) if stored is None else stored
    if beside:
        return folder(flat(), stored, hf_quant_config=config)
    # without Marlin's kernels AWQ computes in float16 alone
    dtype = "float16" if name == "awq" else "bfloat16"
    return folder(flat(dtype=dtype, quantization_config=config | changes), stored)


def _plain(module: str, method: str = "fp8 dynamic") -> make.Tensors:
    kept = tuple(one for one in PROJECTIONS if one not in module.split())
    return quantised(METHODS[method][1], kept)


QKV = "layers.0.self_attn.q_proj layers.0.self_attn.k_proj layers.0.self_attn.v_proj"
NAN = np.full((make.MIDDLE, make.HIDDEN), np.nan, FP8)


def fused(stored: make.Tensors) -> make.Tensors:
    """The same with qkv_proj and gate_up_proj as one matrix each."""
    stored = dict(stored)
    for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        block = whole.partition(".")[0]
        for ending in ("weight", "weight_scale"):
            found = [stored.pop(f"layers.0.{block}.{part}_proj.{ending}") for part in parts]
            stored[f"layers.0.{whole}_proj.{ending}"] = np.concatenate(found)
    return stored


COMPRESSED = METHODS["compressed fp8 dynamic"][0]
CACHE = {f"layers.0.self_attn.{name}": np.ones(1, np.float32) for name in ("k_proj.k_scale", "attn.v_scale")}
EXCEPT_ALL = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model*"]}}


LACKING = (
    ("fp8 static", "activation_scheme"),
    ("awq", "bits"),
    ("awq", "group_size"),
    ("awq", "zero_point"),
    ("gptq", "bits"),
    ("gptq", "group_size"),
    ("gptq", "desc_act"),
)


def _without(method: str, key: str) -> dict[str, Any]:
    return {name: value for name, value in METHODS[method][0].items() if name != key}


def one_feature(name: str) -> Write:
    """A quantised head of one feature, whose only mark is how much enters its layer."""
    config, form, _ = METHODS[name]
    gone = ("fc.weight", "layers.0.hidden_norm.weight")
    stored = {key: value for key, value in quantised(form).items() if key not in gone}
    eagle = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    return folder(flat(dtype="float16", quantization_config=config, eagle_config=eagle), stored)


HEADS = [
    Case(f"head of one feature: {name}", one_feature(name), warns=("weights-present",))
    for name in ("compressed int4", "compressed nvfp4", "fp8 static", "awq", "gptq")
]
QUANTISED = (
    [Case(f"quantised: {name}", as_method(name)) for name in METHODS]
    + HEADS
    + [
        Case(
            "fp8 that names no method",
            folder(flat(), quantised(fp8)),
            PARTLY,
            "quantisation",
            "no quantization_config",
            "add the",
        ),
        Case(
            "fp8 without its scales",
            as_method("fp8 dynamic", {n: v for n, v in quantised(fp8).items() if "scale" not in n}),
            PARTLY,
            "quantisation",
            "weight_scale",
            "ship every",
        ),
        Case(
            "static without input scales",
            as_method("fp8 static", quantised(fp8)),
            PARTLY,
            "quantisation",
            "input_scale",
            "ship every",
        ),
        Case(
            "block scales under the other name",
            as_method("fp8 block", quantised(fp8)),
            PARTLY,
            "quantisation",
            "weight_scale_inv",
            "ship every",
        ),
        Case(
            "quantised fc",
            as_method("fp8 dynamic", quantised(fp8, (*PROJECTIONS, "fc"))),
            PARTLY,
            "quantisation",
            "fc is a plain linear layer",
            "store them unquantised",
        ),
        Case(
            "quantised head",
            as_method("fp8 dynamic", quantised(fp8, (*PROJECTIONS, "lm_head"))),
            PARTLY,
            "quantisation",
            "lm_head",
            "store them unquantised",
        ),
        Case(
            "ModelOpt's head left out, and not excepted",
            folder(flat(), quantised(fp8_static), hf_quant_config={"quantization": {"quant_algo": "FP8"}}),
            PARTLY,
            "quantisation",
            "lm_head",
            "quantise them too",
        ),
        Case(
            "excepted by names the class does not have",
            as_method("fp8 dynamic", _plain(QKV), modules_to_not_convert=[f"model.{one}" for one in QKV.split()]),
            PARTLY,
            "quantisation",
            "stored unquantised",
            "by the class's own names",
        ),
        Case(
            "excepted by the class's names",
            as_method("fp8 dynamic", _plain(QKV), modules_to_not_convert=["q_proj", "k_proj", "v_proj"]),
        ),
        Case(
            "excepted, and quantised all the same",
            as_method("fp8 dynamic", None, modules_to_not_convert=["down_proj"]),
            PARTLY,
            "quantisation",
            "down_proj",
            "store them unquantised",
        ),
        Case("every matrix excepted", as_method("fp8 dynamic", tensors(), modules_to_not_convert=["model"])),
        Case("every matrix excepted, ModelOpt", folder(flat(), tensors(), hf_quant_config=EXCEPT_ALL)),
        *(
            Case(
                f"{method} without {key}",
                folder(flat(dtype="float16", quantization_config=_without(method, key)), quantised(METHODS[method][1])),
                REFUSES,
                "quantisation",
                key,
                "restore the quantization_config",
            )
            for method, key in LACKING
        ),
        Case(
            "blocks larger than a part",
            as_method("fp8 block", quantised(fp8_block), weight_block_size=[128, 128]),
            REFUSES,
            "quantisation",
            "k_proj has 32 rows",
            "smaller blocks",
        ),
        Case(
            "a part excepted by the base class's name",
            as_method("fp8 dynamic", None, modules_to_not_convert=["self_attn.q_proj"]),
            REFUSES,
            "quantisation",
            "some parts of model.self_attn.qkv_proj",
            "except all of",
        ),
        *(
            Case(
                name, folder(flat(quantization_config=config), quantised(form)), engine, "quantisation", words, "write"
            )
            for name, config, form, engine, words in (
                (
                    "method underscored",
                    {**COMPRESSED, "quant_method": "compressed_tensors"},
                    fp8_rows,
                    REFUSES,
                    "knows none",
                ),
                (
                    "method in capitals",
                    {"quant_method": "FP8", "activation_scheme": "dynamic"},
                    fp8,
                    PARTLY,
                    "drops the",
                ),
            )
        ),
        *(
            Case(
                f"no method: {config}",
                folder(flat(quantization_config=config), quantised(fp8)),
                REFUSES,
                "quantisation",
                words,
            )
            for config, words in (
                ({"bits": 4}, "names no quant_method"),
                ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo is 'W4A8'"),
            )
        ),
        Case(
            "order of the groups lost",
            as_method("gptq", {k: v for k, v in quantised(gptq).items() if "g_idx" not in k}, desc_act=True),
            PARTLY,
            "quantisation",
            "g_idx",
            "ship every",
        ),
        Case("scales of a KV cache", as_method("fp8 dynamic", quantised(fp8) | CACHE), PARTLY),
        Case("fused and quantised", as_method("compressed fp8 dynamic", fused(quantised(fp8_rows)))),
        Case(
            "a part of a fused matrix excepted",
            as_method("fp8 dynamic", None, modules_to_not_convert=["q_proj"]),
            REFUSES,
            "quantisation",
            "some parts of model.qkv_proj",
            "except all of q_proj, k_proj, v_proj",
        ),
        Case(
            "a method the engine lacks",
            folder(flat(quantization_config={"quant_method": "eetq"}), quantised(int8_rows)),
            REFUSES,
            "quantisation",
            "refuses to start",
            "quantise it with",
        ),
        Case(
            "named and not done",
            folder(flat(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}), tensors()),
            PARTLY,
            "quantisation",
            "stored unquantised",
            "",
        ),
        Case(
            "NaN in fp8",
            as_method("fp8 dynamic", quantised(fp8) | {"layers.0.mlp.up_proj.weight": NAN}),
            FINE,
            "finite",
            "up_proj.weight (6,144 of 6,144)",
            "never loaded",
        ),
        Case(
            "8-bit floats that were cast",
            folder(
                flat(),
                tensors() | {"layers.0.mlp.up_proj.weight": tensors()["layers.0.mlp.up_proj.weight"].astype(FP8)},
            ),
        ),
    ]
)
