"""What the tools that quantise a draft write of a matrix, and of how they did it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make
from tests.support.tensor_cases import HEALTHY, tensors

Form = Callable[[np.ndarray[Any, Any]], make.Tensors]


FP8, INT8, BYTES, WORDS, SCALES = ml_dtypes.float8_e4m3fn, np.int8, np.uint8, np.int32, np.float32
PROJECTIONS = tuple(name.removesuffix(".weight") for name in HEALTHY if name.endswith("_proj.weight"))


def quantised(
    form: Callable[[np.ndarray[Any, Any]], make.Tensors], only: tuple[str, ...] = PROJECTIONS
) -> make.Tensors:
    """The healthy tensors with `form` of each matrix in place of it."""
    stored = tensors()
    for module in only:
        matrix = stored.pop(f"{module}.weight").astype(np.float32)
        stored |= {f"{module}.{ending}": value for ending, value in form(matrix).items()}
    return stored


def fp8(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    return {"weight": (matrix * 100).astype(FP8), "weight_scale": np.array([0.01], SCALES)}


def fp8_static(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    return fp8(matrix) | {"input_scale": np.array([0.02], SCALES)}


def fp8_block(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    rows, columns = (-(-n // 32) for n in matrix.shape)
    return {"weight": (matrix * 100).astype(FP8), "weight_scale_inv": np.full((rows, columns), 0.01, SCALES)}


def fp8_rows(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    return {"weight": (matrix * 100).astype(FP8), "weight_scale": np.full((len(matrix), 1), 0.01, SCALES)}


def int8_rows(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    return {"weight": (matrix * 100).astype(INT8), "weight_scale": np.full((len(matrix), 1), 0.01, SCALES)}


def int4(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    rows, columns = matrix.shape
    return {
        "weight_packed": np.arange(rows * columns // 8, dtype=WORDS).reshape(rows, columns // 8),
        "weight_scale": np.full((rows, columns // 32), 0.01, ml_dtypes.bfloat16),
        "weight_shape": np.array([rows, columns], np.int64),
    }


def nvfp4(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    rows, columns = matrix.shape
    return {
        "weight": np.full((rows, columns // 2), 33, BYTES),
        "weight_scale": np.ones((rows, columns // 16), FP8),
        "weight_scale_2": np.array(0.01, SCALES),
        "input_scale": np.array(0.02, SCALES),
    }


def nvfp4_compressed(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    found = nvfp4(matrix)
    return {
        "weight_packed": found["weight"],
        "weight_scale": found["weight_scale"],
        "weight_global_scale": np.array([100.0], SCALES),
        "input_global_scale": np.array([50.0], SCALES),
    }


def awq(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    rows, columns = matrix.shape
    return {
        "qweight": np.ones((columns, rows // 8), WORDS),
        "qzeros": np.ones((columns // 32, rows // 8), WORDS),
        "scales": np.ones((columns // 32, rows), np.float16),
    }


def gptq(matrix: np.ndarray[Any, Any]) -> make.Tensors:
    rows, columns = matrix.shape
    return {
        "qweight": np.ones((columns // 8, rows), WORDS),
        "qzeros": np.ones((columns // 32, rows // 8), WORDS),
        "scales": np.ones((columns // 32, rows), np.float16),
        "g_idx": (np.arange(columns) // 32).astype(WORDS),
    }


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A compressed-tensors config with one group of all linear layers."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*fc"],
        "config_groups": {"group_0": group},
    } | more


FLOAT8, FLOAT4 = (
    {"num_bits": 8, "type": "float"},
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
)
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {**DYNAMIC, "strategy": "tensor", "dynamic": False}
#: name: (quantization_config, the form of a matrix, what lies in a file beside instead of in the config)
METHODS: dict[str, tuple[dict[str, Any], Form, bool]] = {
    "fp8 dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8, False),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static, False),
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        fp8_block,
        False,
    ),
    "compressed fp8 static": (
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}, STATIC),
        fp8_static,
        False,
    ),
    "compressed fp8 dynamic": (
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, DYNAMIC),
        fp8_rows,
        False,
    ),
    "compressed int8": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**DYNAMIC, "type": "int"}),
        int8_rows,
        False,
    ),
    "compressed int4": (
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
        int4,
        False,
    ),
    "compressed nvfp4": (
        compressed("nvfp4-pack-quantized", FLOAT4, {**FLOAT4, "symmetric": True, "dynamic": "local"}),
        nvfp4_compressed,
        False,
    ),
    "modelopt fp8": ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, fp8_static, True),
    "modelopt fp8, in the config": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8_static,
        False,
    ),
    "modelopt nvfp4": (
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": None,
                "exclude_modules": ["lm_head", "fc"],
            }
        },
        nvfp4,
        True,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq, False),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, gptq, False),
}
