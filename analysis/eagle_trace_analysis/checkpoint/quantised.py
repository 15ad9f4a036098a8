"""Quantised drafts: which tensors SGLang's class takes for each method, and where a file holds others.

Read from `sglang/srt/layers/quantization` of the version in `engine`; `tests/integration/test_engine_table.py` holds
the tables against it. A method wraps the projections of the decoder layers. `fc` is a plain `torch.nn.Linear` and is
never quantised; the head is with the methods that say so below.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint import engine
from eagle_trace_analysis.checkpoint.export import QUANTISATION_FILE
from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.checkpoint.finding import Finding, failed, listed, passed, skipped
from eagle_trace_analysis.checkpoint.subject import Subject

#: endings of what stands in for a matrix, and of what goes with it
PACKED = ("weight_packed", "qweight")
MATRICES = ("weight", *PACKED)
BESIDE = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale",
    "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx", "output_scale",
)  # fmt: skip
#: scales of the KV cache: the class drops those it has no place for, and the cache keeps its scale of 1
CACHE = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")

#: every method the engine knows on a CUDA GPU, and the names it overrides on the way
METHODS = frozenset({
    "fp8", "mxfp8", "minimax_m3_nvfp4", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4", "nvfp4_online",
    "modelopt_mixed", "w8a8_int8", "w8a8_fp8", "awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin",
    "moe_wna16", "compressed-tensors", "w4afp8", "petit_nvfp4", "quark", "quark_mxfp4", "auto-round", "auto-round-int8",
    "modelslim", "quark_int4fp8_moe", "humming", "mxfp_w4a8", "mxfp4",
})  # fmt: skip
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
        ignored: names of modules that keep their dtype, as the config gives them.
    """

    method: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    head: bool = False
    ignored: tuple[str, ...] = field(default=())

    def covers(self, module: str) -> bool:
        """Whether the engine takes ``layers.0.mlp.up_proj`` or ``lm_head`` for quantised."""
        if module == "lm_head":
            return self.head and not self._ignores(module)
        place = PLACES.get(module.split(".", 2)[2] if module.count(".") > 1 else "")
        return place is not None and not self._ignores(place)

    def torn(self) -> list[str]:
        """Fused matrices of which the config excepts some parts and not all: the engine stops at these."""
        if self.method == "compressed-tensors" or self.method.startswith(("awq", "gptq")):
            return []
        found = [(place, [self._excepts(name) for name in _parts(place)]) for place in dict.fromkeys(PLACES.values())]
        return [place for place, excepted in found if any(excepted) and not all(excepted)]

    def _ignores(self, place: str) -> bool:
        if self.method == "compressed-tensors":
            # the class tells this method of no fused names
            return any(_same_or_matches(one, place) for one in self.ignored)
        if self.method.startswith("awq"):
            return any(one in place for one in self.ignored)
        if self.method.startswith("modelopt") and any(_wild(one, place) for one in self.ignored):
            return True
        return all(self._excepts(name) for name in _parts(place))

    def _excepts(self, name: str) -> bool:
        return any(_on_path(one, name) for one in self.ignored)


def _parts(place: str) -> list[str]:
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


def scheme_of(said: Mapping[str, Any]) -> Scheme | str:
    """What the engine holds under a quantisation config, or why that is not known here."""
    method = str(said.get("quant_method") or ("modelopt" if said.get("quant_algo") else "")).lower()
    if method == "compressed_tensors":
        method = "compressed-tensors"
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
        return Scheme(method, ("weight", scale, *static), ("input_scale",), ignored=both)
    if method in ("w8a8_int8", "w8a8_fp8"):
        return Scheme(method, ("weight", "weight_scale"))
    if method == "blockwise_int8":
        return Scheme(method, ("weight", "weight_scale_inv"), ignored=skipped_modules)
    head = bool(said.get("lm_head"))
    if method.startswith("awq"):
        return Scheme(method, ("qweight", "qzeros", "scales"), head=head, ignored=skipped_modules)
    if method.startswith("gptq"):
        if said.get("dynamic"):
            return "its rules for single modules (dynamic) are not read here"
        return Scheme(method, ("qweight", "scales"), ("qzeros", "g_idx"), head=head)
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
        return Scheme("compressed-tensors", ("weight", "weight_scale", *static), ignored=ignored)
    if kind == "int" and not acts:
        zeros = () if weights.get("symmetric", True) else ("weight_zero_point",)
        needed = ("weight_packed", "weight_scale", *zeros)
        return Scheme("compressed-tensors", needed, ("weight_shape", "weight_g_idx"), ignored=ignored)
    if kind == "float" and bits == 4 and weights.get("strategy") == "tensor_group":
        needed = ("weight_packed", "weight_scale", "weight_global_scale", *(("input_global_scale",) if acts else ()))
        return Scheme("compressed-tensors", needed, ignored=ignored)
    return f"what {engine.ENGINE} loads for {bits}-bit {kind} weights is not known here"


def module_of(name: str) -> tuple[str, str] | None:
    """Module and ending of a tensor that belongs to a quantised (or quantisable) matrix, by speculators' names."""
    module, _, ending = engine.canonical_name(name).rpartition(".")
    return (module, ending) if module and ending in (*MATRICES, *BESIDE) else None


def spoken_for(name: str) -> bool:
    """Whether `check_quantisation` judges a stored tensor, so that the checks on names leave it alone."""
    canonical = engine.canonical_name(name)
    found = module_of(name)
    beside = found is not None and found[1] != "weight"
    return beside or canonical.endswith(CACHE) or ".weight." in canonical


def is_packed(tensor: StoredTensor) -> bool:
    """Whether a matrix is stored otherwise than as the numbers it stands for."""
    return tensor.name.rsplit(".", 1)[-1] in MATRICES and not tensor.is_float


def modules(names: Iterable[str]) -> dict[str, set[str]]:
    """Endings stored of each module."""
    found: dict[str, set[str]] = {}
    for name in names:
        split = module_of(name)
        if split is not None and not engine.canonical_name(name).endswith(CACHE):
            for module in _unfused(split[0]):
                found.setdefault(module, set()).add(split[1])
    return found


def _unfused(module: str) -> Sequence[str]:
    for fused, parts in engine.STACKED.items():
        if module.endswith(f".{fused}"):
            return [f"{module.removesuffix(fused)}{part}" for part in parts]
    return [module]


def check_quantisation(subject: Subject) -> Finding:
    """Quantised tensors against the places the engine makes for them."""
    name, cause = "quantisation", "weights-dropped"
    said = read_quantisation(subject.checkpoint.folder, subject.served)
    stored = modules(subject.checkpoint.tensors)
    packed = sorted({module for module, endings in stored.items() if _is_quantised(subject, module, endings)})
    if said is None:
        if not packed:
            return passed(name, cause, "not quantised")
        return failed(
            name,
            cause,
            f"{listed(packed, 3)} are stored quantised, and no quantization_config says so: the engine casts what it "
            "finds and drops the scales",
            "add the quantization_config (or ModelOpt's hf_quant_config.json) that the quantising tool wrote",
        )
    method = str(said.get("quant_method") or said.get("quant_algo") or "").lower()
    if (
        method
        and method not in METHODS
        and not method.startswith(("modelopt", "compressed"))
        and "quant_algo" not in said
    ):
        return failed(
            name,
            cause,
            f"quant_method is {method!r}, which {engine.ENGINE} refuses to start with",
            "quantise it with a method the engine has (fp8, compressed-tensors, modelopt, awq, gptq)",
        )
    scheme = scheme_of(said)
    if isinstance(scheme, str):
        return skipped(name, cause, f"not checked: the draft is quantised, and {scheme}")
    return _judge(subject, scheme, stored, packed)


def _is_quantised(subject: Subject, module: str, endings: set[str]) -> bool:
    if endings - {"weight"}:
        return True
    tensor = subject.tensors.get(f"{module}.weight")
    # 8-bit floats without a scale are cast to what they are
    return tensor is not None and not tensor.is_float and not tensor.dtype.startswith("F8_E")


def _judge(subject: Subject, scheme: Scheme, stored: Mapping[str, set[str]], packed: Sequence[str]) -> Finding:
    name, cause = "quantisation", "weights-dropped"
    known = [one.removesuffix(".weight") for one in engine.parameters(subject.served) if one.endswith(".weight")]
    torn = scheme.torn()
    if torn:
        return failed(
            name,
            cause,
            f"the quantization_config excepts some parts of {listed(torn)} and not all, at which the engine stops",
            f"except all of {listed([part.rpartition('.')[2] for part in _parts(torn[0])])}, or none",
        )
    covered = [module for module in known if scheme.covers(module)]
    plain = [one for one in covered if stored.get(one) == {"weight"} and subject.tensors[f"{one}.weight"].is_float]
    if plain:
        return failed(
            name,
            "weights-missing",
            f"{listed(plain, 3)} are stored unquantised, and the engine takes them for quantised ({scheme.method})"
            + (f": its class calls them {PLACES.get(plain[0].split('.', 2)[-1], plain[0])!r} and the like, by which "
               f"{list(scheme.ignored[:3])} does not except them" if scheme.ignored else ""),
            "quantise them too, or except them in the quantization_config by the class's own names",
        )  # fmt: skip
    stray = [one for one in packed if one in known and one not in covered]
    if stray:
        why = "fc is a plain linear layer there" if "fc" in stray else "the engine holds them unquantised"
        return failed(
            name,
            cause,
            f"{listed(stray, 3)} are stored quantised, but {why}: what it finds is cast and the scales are dropped, or "
            "the shapes stop the server",
            "store them unquantised and name them in the list of what is not quantised",
        )
    lacking = [
        f"{module}.{ending}" for module in covered for ending in scheme.needed
        if module in stored and ending not in stored[module]
    ]  # fmt: skip
    if lacking:
        return failed(
            name,
            "weights-missing",
            f"quantised as {scheme.method}, without {listed(lacking, 3)}: these scales keep their start",
            "ship every tensor the quantising tool wrote, under its names",
        )
    if not packed:
        return failed(name, cause, f"the config says {scheme.method}, and no tensor is quantised",
                      "remove the quantization_config")  # fmt: skip
    beside = sum(len(stored[one] - set(MATRICES)) for one in packed if one in covered)
    return passed(
        name,
        cause,
        f"{scheme.method}: {len(packed)} quantised matrices, with {beside} scales and the like, as the engine has them",
    )
