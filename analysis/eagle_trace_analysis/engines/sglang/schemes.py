"""How a quantised draft says what it is, and what SGLang's class then holds for a matrix.

Read from `sglang/srt/layers/quantization` of the version in `engine`; `tests/integration/test_tensor_judge.py` holds
the tables against it. A method wraps the projections of the decoder layers. `fc` is a plain `torch.nn.Linear` and is
never quantised; the head is with the methods that say so below.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.engines.sglang import engine

#: where ModelOpt says how a draft is quantised
QUANTISATION_FILE = "hf_quant_config.json"
SIDE_FILES = (QUANTISATION_FILE,)
#: every method the engine knows on a CUDA GPU, and the names it overrides on the way
METHODS = frozenset({
    "fp8", "mxfp8", "minimax_m3_nvfp4", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4", "nvfp4_online",
    "modelopt_mixed", "w8a8_int8", "w8a8_fp8", "awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin",
    "moe_wna16", "compressed-tensors", "w4afp8", "petit_nvfp4", "quark", "quark_mxfp4", "auto-round", "auto-round-int8",
    "modelslim", "quark_int4fp8_moe", "humming", "mxfp_w4a8", "mxfp4",
})  # fmt: skip
#: what a method's config must say, under one of these names
REQUIRED: dict[str, tuple[tuple[str, ...], ...]] = {
    "fp8": (("activation_scheme",),),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
    "gptq": (("bits",), ("group_size",), ("desc_act",)),
}
#: matrices that a method may quantise, by the name the class gives them: it leaves out the number of the layer
PLACES = {
    "self_attn.q_proj": "model.qkv_proj", "self_attn.k_proj": "model.qkv_proj", "self_attn.v_proj": "model.qkv_proj",
    "self_attn.o_proj": "model.self_attn.o_proj",
    "mlp.gate_proj": "model.gate_up_proj", "mlp.up_proj": "model.gate_up_proj", "mlp.down_proj": "model.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """What the engine holds for a quantised matrix.

    Attributes:
        needed: endings it must find; without one of them a scale or a matrix keeps its start.
        optional: endings it takes, and does well without.
        head: whether the head is quantised too.
        block: rows that share a scale; the engine wants each part of a fused matrix to be a multiple of it.
        ignored: names of modules that keep their dtype, as the config gives them.
    """

    method: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    head: bool = False
    ignored: tuple[str, ...] = field(default=())
    block: int = 1

    def covers(self, module: str) -> bool:
        """Whether the engine takes ``layers.0.mlp.up_proj`` or ``lm_head`` for quantised."""
        if module == "lm_head":
            return self.head and not self._ignores(module)
        place = PLACES.get(module.split(".", 2)[2] if module.count(".") > 1 else "")
        return place is not None and not self._ignores(place)

    def name_of(self, module: str) -> str:
        """What the class calls a matrix of a decoder layer, by which it can be excepted."""
        return PLACES.get(module.split(".", 2)[-1], module)

    def torn(self) -> list[str]:
        """Fused matrices of which the config excepts some parts and not all: the engine stops at these."""
        if self.method == "compressed-tensors" or self.method.startswith(("awq", "gptq")):
            return []
        # the base class builds its own first, under other names
        places = dict.fromkeys([*PLACES.values(), "model.self_attn.qkv_proj", "model.mlp.gate_up_proj"])
        found = [(place, [self._excepts(name) for name in parts_of(place)]) for place in places]
        return [place for place, excepted in found if any(excepted) and not all(excepted)]

    def parts_of(self, place: str) -> list[str]:
        """The matrices that a fused one of `torn` is made of."""
        return parts_of(place)

    def _ignores(self, place: str) -> bool:
        if self.method == "compressed-tensors":
            # the class tells this method of no fused names
            return any(_same_or_matches(one, place) for one in self.ignored)
        if self.method.startswith("awq"):
            return any(one in place for one in self.ignored)
        if self.method.startswith("modelopt") and any(_wild(one, place) for one in self.ignored):
            return True
        return all(self._excepts(name) for name in parts_of(place))

    def _excepts(self, name: str) -> bool:
        return any(_on_path(one, name) for one in self.ignored)


def parts_of(place: str) -> list[str]:
    """The matrices that a fused one is made of, by name; any other is itself."""
    fused = next((one for one in engine.STACKED if place.endswith(one)), None)
    return [place.replace(fused, part) for part in engine.STACKED[fused]] if fused else [place]


def _same_or_matches(ignored: str, place: str) -> bool:
    if ignored.startswith("re:"):
        return _matches(ignored[3:], place)
    return ignored == place or place.endswith(f".{ignored}")


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.match(pattern, text) is not None
    except re.error:
        return False


def _on_path(ignored: str, place: str) -> bool:
    ignored = ignored.rstrip(".")
    return f".{ignored}." in f".{place}."


def _wild(pattern: str, place: str) -> bool:
    return any(fnmatch.fnmatchcase(one, pattern) for one in (place, *place.split(".")))


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the engine finds said of a draft's quantisation: in its config, else in ModelOpt's file beside it."""
    said = config.get("quantization_config") or config.get("compression_config")
    path = folder / QUANTISATION_FILE
    if said is None and path.is_file():
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        if isinstance(said, Mapping):
            said = {"quant_method": "modelopt", **_mapping(said.get("quantization", said))}
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{folder} says quantization_config: {said!r}, which is not an object")
    return said


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _names(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list | tuple) else ()


def _block(size: Any) -> int:
    rows = size[0] if isinstance(size, list | tuple) and size else 1
    return rows if type(rows) is int and rows > 0 else 1


def quantisation_refused(said: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the engine does not start with a quantisation config (or what it takes it for), and the way out."""
    named, algorithm = str(said.get("quant_method") or ""), str(said.get("quant_algo") or "").upper()
    method = named.lower()
    restore = "restore the quantization_config that the quantising tool wrote"
    if not method and not algorithm:
        return f"the quantization_config names no quant_method, and {engine.ENGINE} does not start so", restore
    if method == "compressed_tensors":
        return f"quant_method is {named!r}, by which the engine knows none", 'write "compressed-tensors"'
    if method and method not in METHODS:
        return (
            f"quant_method is {named!r}, which {engine.ENGINE} refuses to start with",
            "quantise it with a method the engine has (fp8, compressed-tensors, modelopt, awq, gptq)",
        )
    if method in ("fp8", "mxfp8") and named != method:
        return (
            f"quant_method is {named!r}: spelled so, the engine takes the weights for unquantised and drops the scales",
            f'write "{method}"',
        )
    known = algorithm in ("FP8", "MXFP8", "MIXED_PRECISION") or "FP4" in algorithm
    if method in ("", "modelopt") and not known:
        return (
            f"ModelOpt's quant_algo is {said.get('quant_algo')!r}, which {engine.ENGINE} refuses to start with",
            restore,
        )
    lacking = [" or ".join(keys) for keys in REQUIRED.get(method, ()) if not any(key in said for key in keys)]
    if lacking:
        return (
            f"the quantization_config says {method} without {', '.join(lacking)}, and the engine does not start so",
            restore,
        )
    return None


def scheme_of(said: Mapping[str, Any]) -> Scheme | str:
    """What the engine holds under a quantisation config, or why that is not known here."""
    method = str(said.get("quant_method") or ("modelopt" if said.get("quant_algo") else "")).lower()
    if method.startswith("modelopt"):
        return _modelopt(said)
    if method == "compressed-tensors":
        return _compressed(said)
    skipped_modules = _names(said.get("ignored_layers") or said.get("modules_to_not_convert"))
    if method in ("fp8", "mxfp8"):
        # both spellings are kept, with "model." and without
        both = tuple(spelled for one in skipped_modules for spelled in (one, f"model.{one.removeprefix('model.')}"))
        block = method == "mxfp8" or said.get("weight_block_size") is not None
        scale = "weight_scale_inv" if block else "weight_scale"
        static = ("input_scale",) if said.get("activation_scheme") == "static" and not block else ()
        both += tuple(one.removeprefix("model.") for one in both)
        rows = _block(said.get("weight_block_size")) if method == "fp8" else 1
        return Scheme(method, ("weight", scale, *static), ("input_scale",), ignored=both, block=rows)
    if method in ("w8a8_int8", "w8a8_fp8"):
        return Scheme(method, ("weight", "weight_scale"))
    if method == "blockwise_int8":
        rows = _block(said.get("weight_block_size"))
        return Scheme(method, ("weight", "weight_scale_inv"), ignored=skipped_modules, block=rows)
    head = bool(said.get("lm_head"))
    if method.startswith("awq"):
        return Scheme(method, ("qweight", "qzeros", "scales"), head=head, ignored=skipped_modules)
    if method.startswith("gptq"):
        if said.get("dynamic"):
            return "its rules for single modules (dynamic) are not read here"
        # symmetric weights have no use for zero points, and without desc_act the order of the groups is the plain one
        needed = {"qzeros": not said.get("sym", True), "g_idx": bool(said.get("desc_act"))}
        extra = tuple(one for one in needed if not needed[one])
        return Scheme(method, ("qweight", "scales", *(one for one in needed if needed[one])), extra, head=head)
    return f"what {engine.ENGINE} loads under {method or 'no quant_method'} is not known here"


def _modelopt(said: Mapping[str, Any]) -> Scheme | str:
    algorithm = str(said.get("quant_algo") or "").upper()
    ignored = _names(said.get("exclude_modules") or said.get("ignore"))
    if algorithm == "FP8":
        return Scheme("modelopt_fp8", ("weight", "weight_scale", "input_scale"), head=True, ignored=ignored)
    if algorithm == "NVFP4":
        needed = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        return Scheme("modelopt_fp4", needed, head=True, ignored=ignored)
    return f"what {engine.ENGINE} loads under ModelOpt's {algorithm or 'config'} is not known here"


def _compressed(said: Mapping[str, Any]) -> Scheme | str:
    groups = [_mapping(one) for one in _mapping(said.get("config_groups")).values()]
    if len(groups) != 1 or _names(groups[0].get("targets")) != ("Linear",):
        return "groups that name single modules are not read here"
    weights, acts = _mapping(groups[0].get("weights")), _mapping(groups[0].get("input_activations"))
    kind, bits = weights.get("type"), weights.get("num_bits")
    ignored = _names(said.get("ignore"))
    static = ("input_scale",) if acts and not acts.get("dynamic") else ()
    if bits == 8 and (kind == "float" or acts):
        rows = _block(weights.get("block_structure"))
        return Scheme("compressed-tensors", ("weight", "weight_scale", *static), ignored=ignored, block=rows)
    if kind == "int" and not acts:
        zeros = () if weights.get("symmetric", True) else ("weight_zero_point",)
        needed = ("weight_packed", "weight_scale", *zeros)
        return Scheme("compressed-tensors", needed, ("weight_shape", "weight_g_idx"), ignored=ignored)
    if kind == "float" and bits == 4 and weights.get("strategy") == "tensor_group":
        needed = ("weight_packed", "weight_scale", "weight_global_scale", *(("input_global_scale",) if acts else ()))
        return Scheme("compressed-tensors", needed, ignored=ignored)
    return f"what {engine.ENGINE} loads for {bits}-bit {kind} weights is not known here"
