"""Drafts whose tensors or files are out of the ordinary: what the engine makes of each, and what `check` must say.

The unit tests ask `check`; `tests/integration/test_tensor_judge.py` asks the engine's own loader about the same
folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make

Write = Callable[[Path], object]
Form = Callable[[np.ndarray[Any, Any]], make.Tensors]

#: what the engine does: loads all of it; leaves something at its start or drops it; does not start
FINE, PARTLY, REFUSES = "fine", "partly", "refuses"


@dataclass(frozen=True)
class Case:
    """A folder.

    Attributes:
        engine: what the engine's loader makes of it.
        finding, words: the one check that fails and what it says ("" if nothing may fail).
        fix: what its fix says.
        warns: checks that warn.
    """

    name: str
    write: Write
    engine: str = FINE
    finding: str = ""
    words: str = ""
    fix: str = ""
    warns: tuple[str, ...] = field(default=())


def flat(**changes: Any) -> dict[str, Any]:
    """The flat config of the healthy draft."""
    config = make.decoder_config(1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": make.DRAFT_VOCABULARY,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
    }
    return config | changes


HEALTHY = make.draft_tensors()


def tensors(*without: str) -> make.Tensors:
    """The healthy draft's tensors without its embedding and some others."""
    gone = ("embed_tokens.weight", *without)
    return {name: value for name, value in HEALTHY.items() if name not in gone}


def layer(index: int) -> make.Tensors:
    """A further layer, behind the first."""
    found = {}
    for name, value in HEALTHY.items():
        if name.startswith("layers.0."):
            narrow = value[:, : make.HIDDEN] if name.split(".")[3] in ("q_proj", "k_proj", "v_proj") else value
            found[name.replace("layers.0.", f"layers.{index}.")] = narrow
    return found


def folder(config: dict[str, Any], stored: make.Tensors, **beside: dict[str, Any]) -> Write:
    def write(path: Path) -> None:
        make.write_checkpoint(path, config, stored)
        for name, content in beside.items():
            (path / f"{name}.json").write_text(json.dumps(content))

    return write


# ---- layer counts ----------------------------------------------------------------------------------------------

MIDLAYER = {name.replace("layers.0.", "midlayer."): value for name, value in tensors().items()}
COUNTS = [
    Case(
        "count of the target",
        folder(flat(num_hidden_layers=30), tensors()),
        PARTLY,
        "weights-present",
        "the config counts 30 decoder layers",
        "set num_hidden_layers to 1",
    ),
    Case(
        "count of the target, midlayer",
        folder(flat(num_hidden_layers=3), MIDLAYER),
        PARTLY,
        "weights-present",
        "the file holds 1",
        "set num_hidden_layers to 1",
    ),
    Case(
        "count too small",
        folder(flat(), tensors() | layer(1)),
        PARTLY,
        "weight-names",
        "the file holds 2",
        "set num_hidden_layers to 2",
    ),
    Case(
        "count too small, midlayer",
        folder(flat(num_hidden_layers=2), MIDLAYER | layer(1) | layer(2)),
        PARTLY,
        "weight-names",
        "the config counts 2 decoder layers, the file holds 3",
        "set num_hidden_layers to 3",
    ),
    Case("two layers", folder(flat(num_hidden_layers=2), tensors() | layer(1))),
]

# ---- how much is fed -------------------------------------------------------------------------------------------

NORM = "layers.0.hidden_norm.weight"
ONE = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}


def fc(width: int) -> make.Tensors:
    """The draft with an fc of another width."""
    draw = np.random.default_rng(11)
    return tensors() | {"fc.weight": (draw.standard_t(5, (make.HIDDEN, width)) * 0.1).astype(ml_dtypes.bfloat16)}


def ids(*named: int, **more: Any) -> dict[str, Any]:
    return flat(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(named)}, **more)


FED = [
    Case("one feature", folder(flat(eagle_config=ONE), tensors("fc.weight", NORM)), warns=("weights-present",)),
    Case("one feature with its norm", folder(flat(eagle_config=ONE), tensors("fc.weight"))),
    Case("one feature, no ids", folder(flat(eagle_config={"use_aux_hidden_state": False}), tensors("fc.weight"))),
    Case("one captured layer", folder(ids(29), tensors("fc.weight"))),
    Case("two features", folder(ids(1, 14), fc(2 * make.HIDDEN))),
    Case("four features", folder(ids(1, 14, 20, 26), fc(4 * make.HIDDEN))),
    Case(
        "one feature, flag on",
        folder(flat(), tensors("fc.weight", NORM)),
        PARTLY,
        "aux-hidden-state",
        "holds no fc",
        "set eagle_config.use_aux_hidden_state to false",
        ("weights-present",),
    ),
    Case("fc lost", folder(flat(), tensors("fc.weight")), PARTLY, "weights-present", "fc.weight", "ship them"),
    Case(
        "three features, flag off",
        folder(flat(eagle_config={**ONE, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}), tensors()),
        FINE,
        "aux-hidden-state",
        "takes 3",
        "set eagle_config.use_aux_hidden_state to true",
    ),
    Case(
        "fc of one feature",
        folder(flat(eagle_config=ONE, num_aux_hidden_states=1), fc(make.HIDDEN)),
        FINE,
        "aux-hidden-state",
        "is skipped",
        "train without fc",
    ),
    Case(
        "fc of one feature, built for three",
        folder(flat(eagle_config=ONE), fc(make.HIDDEN)),
        REFUSES,
        "aux-hidden-state",
        "is skipped",
        "train without fc",
    ),
    Case(
        "fc of one captured layer", folder(ids(29), fc(make.HIDDEN)), FINE, "fc-width", "skips fc", "train on several"
    ),
    Case("fc too wide", folder(flat(), fc(4 * make.HIDDEN)), REFUSES, "fc-width", "3 layers", "name that many"),
    Case(
        "four announced, three named",
        folder(flat(num_aux_hidden_states=4), fc(4 * make.HIDDEN)),
        FINE,
        "fc-width",
        "captures 3 layers",
        "name the 4 trained layers",
    ),
    Case(
        "bias of fc",
        folder(flat(), tensors() | {"fc.bias": np.ones(make.HIDDEN, np.float32)}),
        PARTLY,
        "fc-width",
        "fc has a bias",
        '"bias" to true',
    ),
    Case(
        "bias of fc, asked for",
        folder(
            flat(bias=True),
            tensors()
            | {
                "fc.bias": np.ones(make.HIDDEN, np.float32),
                "layers.0.self_attn.o_proj.bias": np.ones(make.HIDDEN, np.float32),
            },
        ),
    ),
    Case(
        "bias of fc, without o_proj's",
        folder(flat(bias=True), tensors() | {"fc.bias": np.ones(make.HIDDEN, np.float32)}),
        PARTLY,
        "weights-present",
        "o_proj.bias",
        "ship them",
    ),
]

# ---- files -----------------------------------------------------------------------------------------------------


def _repeated(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "model-00001-of-00001.safetensors", tensors())


def _consolidated(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "consolidated.safetensors", {"output.weight": np.ones(3, np.float32)})


def _other_index(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    index = {"weight_map": {"fc.weight": "gone.safetensors"}}
    (path / "diffusion.safetensors.index.json").write_text(json.dumps(index))


LORA = {
    "base_model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((4, 64), np.float32),
    "base_model.model.layers.0.mlp.up_proj.lora_B.weight": np.ones((96, 4), np.float32),
}


def _adapter(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "adapter_model.safetensors", LORA)


def _adapter_hides_bin(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"never read")
    make.write_safetensors(path / "adapter_model.safetensors", LORA)


INVERSE = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
FILES = [
    Case("twice in two files", _repeated, warns=("weight-names",)),
    Case("consolidated beside", _consolidated),
    Case("an index of something else", _other_index),
    Case("adapter beside", _adapter, PARTLY, warns=("weight-names",)),
    Case("adapter hides the .bin", _adapter_hides_bin, PARTLY, "format", "leaves pytorch_model.bin", "merge it"),
    Case("a buffer that is rebuilt", folder(flat(), tensors() | INVERSE), PARTLY),
]

# ---- quantised -------------------------------------------------------------------------------------------------

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


def as_method(name: str, stored: make.Tensors | None = None, **changes: Any) -> Write:
    config, form, beside = METHODS[name]
    stored = quantised(form) if stored is None else stored
    if beside:
        return folder(flat(), stored, hf_quant_config=config)
    return folder(flat(quantization_config=config | changes), stored)


def _plain(module: str, method: str = "fp8 dynamic") -> make.Tensors:
    kept = tuple(one for one in PROJECTIONS if one not in module.split())
    return quantised(METHODS[method][1], kept)


QKV = "layers.0.self_attn.q_proj layers.0.self_attn.k_proj layers.0.self_attn.v_proj"
NAN = np.full((make.MIDDLE, make.HIDDEN), np.nan, FP8)
QUANTISED = [Case(f"quantised: {name}", as_method(name)) for name in METHODS] + [
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
            flat(), tensors() | {"layers.0.mlp.up_proj.weight": tensors()["layers.0.mlp.up_proj.weight"].astype(FP8)}
        ),
    ),
]

CASES = [*COUNTS, *FED, *FILES, *QUANTISED]
