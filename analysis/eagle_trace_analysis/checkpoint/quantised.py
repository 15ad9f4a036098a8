"""Quantised drafts: the tensors a file holds against those SGLang's class takes (`schemes`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.checkpoint.finding import Finding, failed, listed, passed, skipped
from eagle_trace_analysis.checkpoint.subject import Subject
from eagle_trace_analysis.engines import SGLANG, Engine, Scheme

#: endings of what stands in for a matrix, and of what goes with it
PACKED = ("weight_packed", "qweight")
MATRICES = ("weight", *PACKED)
BESIDE = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale",
    "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx", "output_scale",
)  # fmt: skip
#: scales of the KV cache: the class drops those it has no place for, and the cache keeps its scale of 1
CACHE = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")


def module_of(name: str, engine: Engine = SGLANG) -> tuple[str, str] | None:
    """Module and ending of a tensor that belongs to a quantised (or quantisable) matrix, by speculators' names."""
    module, _, ending = engine.canonical_name(name).rpartition(".")
    return (module, ending) if module and ending in (*MATRICES, *BESIDE) else None


def spoken_for(name: str, engine: Engine = SGLANG) -> bool:
    """Whether `check_quantisation` judges a stored tensor, so that the checks on names leave it alone."""
    canonical = engine.canonical_name(name)
    found = module_of(name, engine)
    beside = found is not None and found[1] != "weight"
    return beside or canonical.endswith(CACHE) or ".weight." in canonical


def is_packed(tensor: StoredTensor) -> bool:
    """Whether a matrix is stored otherwise than as the numbers it stands for."""
    return tensor.name.rsplit(".", 1)[-1] in MATRICES and not tensor.is_float


def modules(names: Iterable[str], engine: Engine = SGLANG) -> dict[str, set[str]]:
    """Endings stored of each module."""
    found: dict[str, set[str]] = {}
    for name in names:
        split = module_of(name, engine)
        if split is not None and not engine.canonical_name(name).endswith(CACHE):
            for module in _unfused(split[0], engine):
                found.setdefault(module, set()).add(split[1])
    return found


def _unfused(module: str, engine: Engine) -> Sequence[str]:
    for fused, parts in engine.STACKED.items():
        if module.endswith(f".{fused}"):
            return [f"{module.removesuffix(fused)}{part}" for part in parts]
    return [module]


def check_quantisation(subject: Subject) -> Finding:
    """Quantised tensors against the places the engine makes for them."""
    name, cause = "quantisation", "weights-dropped"
    said = subject.engine.read_quantisation(subject.checkpoint.folder, subject.served)
    stored = modules(subject.checkpoint.tensors, subject.engine)
    packed = sorted({module for module, endings in stored.items() if _is_quantised(subject, module, endings)})
    if said is None:
        if not packed:
            return passed(name, cause, "not quantised")
        return failed(
            name,
            cause,
            f"stored quantised: {listed(packed, 3)}; and no quantization_config says so: the engine casts what it "
            "finds and drops the scales",
            "add the quantization_config (or ModelOpt's hf_quant_config.json) that the quantising tool wrote",
        )
    why = subject.engine.quantisation_refused(said)
    if why is not None:
        return failed(name, cause, *why)
    scheme = subject.engine.scheme_of(said)
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
    known = [
        one.removesuffix(".weight") for one in subject.engine.parameters(subject.served) if one.endswith(".weight")
    ]
    torn = scheme.torn()
    if torn:
        return failed(
            name,
            cause,
            f"the quantization_config excepts some parts of {listed(torn)} and not all, at which the engine stops",
            f"except all of {listed([part.rpartition('.')[2] for part in scheme.parts_of(torn[0])])}, or none",
        )
    covered = [module for module in known if scheme.covers(module)]
    uneven = _uneven(subject, scheme, covered)
    if uneven:
        return failed(
            name,
            cause,
            f"{listed(uneven, 3)}: no multiple of the {scheme.block} rows that share a scale, and the engine stops",
            "quantise it in smaller blocks, or with one scale per row",
        )
    plain = [one for one in covered if stored.get(one) == {"weight"} and subject.tensors[f"{one}.weight"].is_float]
    if plain:
        return failed(
            name,
            "weights-missing",
            f"stored unquantised: {listed(plain, 3)}; and the engine takes them for quantised ({scheme.method})"
            + (f": its class calls them {scheme.name_of(plain[0])!r} and the like, by which "
               f"{list(scheme.ignored[:3])} does not except them" if scheme.ignored else ""),
            "quantise them too, or except them in the quantization_config by the class's own names",
        )  # fmt: skip
    stray = [one for one in packed if one in known and one not in covered]
    if stray:
        why = "fc is a plain linear layer there" if "fc" in stray else "the engine holds them unquantised"
        return failed(
            name,
            cause,
            f"stored quantised: {listed(stray, 3)}; but {why}: what it finds is cast and the scales are dropped, or "
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
        return passed(name, cause, f"{scheme.method}, with every matrix excepted")
    beside = sum(len(stored[one] - set(MATRICES)) for one in packed if one in covered)
    return passed(
        name,
        cause,
        f"{scheme.method}: {len(packed)} quantised matrices, with {beside} scales and the like, as the engine has them",
    )


def _uneven(subject: Subject, scheme: Scheme, covered: Sequence[str]) -> list[str]:
    """Parts of fused matrices that do not end where a block does."""
    shapes = subject.engine.parameters(subject.served)
    fused = [part for parts in subject.engine.STACKED.values() for part in parts]
    rows = {module: shapes[f"{module}.weight"][0] for module in covered if module.endswith(tuple(fused))}
    return [f"{module} has {count} rows" for module, count in rows.items() if count % scheme.block]
