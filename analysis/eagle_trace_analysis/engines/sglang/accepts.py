"""What the engine's own config loader takes: keys, types, spellings. No transformers is imported.

transformers 5 checks a config's values against the types of the config class that `model_type` picks, SGLang reads
further keys, and its rotary embedding is built from what is left. A value that one of them refuses stops the server
before it loads a weight. `config_classes.json` holds the classes' types and defaults (made by
`tests/support/config_classes.py`), the functions here the rest; `tests/integration/test_engine_judge.py` holds every
answer against the real loader, key by key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from eagle_trace_analysis.engines.refusal import Refusal, is_number, not_an_object, shown
from eagle_trace_analysis.engines.sglang.rope_forms import rope_refusals

#: dtypes a server can compute in, as a config may spell them
DTYPES = frozenset({"float16", "half", "float32", "float", "bfloat16", "float64", "double"})
#: keys without which no shape can be checked
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
)  # fmt: skip
#: keys that count positions ahead of max_position_embeddings, in the engine's order
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
#: `layer_types` that transformers knows, and what older configs called some of them
LAYER_TYPES = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention",
    "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "conv", "moe", "hybrid",
    "hybrid_sliding", "linear_attention", "sparse", "dense", "mamba", "attention", "deepseek_sparse_attention",
    "qwen_sparse_attention",
})  # fmt: skip
#: types that a class declares and then cannot reckon with
NARROWER = {
    ("exaone4", "sliding_window"): "int",
    ("exaone4", "sliding_window_pattern"): "int",
    ("qwen2_moe", "num_key_value_heads"): "int",
}
#: what holds for every config class, known here or not: values that the engine reckons with
ANY_CLASS: dict[str, Any] = {
    "class": "the engine",
    "types": {
        "hidden_size": "int | None", "intermediate_size": "int | None", "num_hidden_layers": "int | None",
        "num_attention_heads": "int | None", "num_key_value_heads": "int | None", "head_dim": "int | None",
        "vocab_size": "int | None", "max_position_embeddings": "int | None", "rms_norm_eps": "float | int | None",
        "initializer_range": "float | int | None", "rope_parameters": "dict | None",
    },
    "needs": (),
}  # fmt: skip


@cache
def table() -> Mapping[str, Any]:
    """The classes' table: `model_types` (a set), and `classes` by model type."""
    text = files("eagle_trace_analysis.engines.sglang").joinpath("config_classes.json").read_text(encoding="utf-8")
    data = json.loads(text)
    known: dict[str, Any] = data | {"model_types": frozenset(data["model_types"].split())}
    return known


def config_class(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of the class that a config's `model_type` picks; None if it is not in the table."""
    kind = config.get("model_type")
    found: Mapping[str, Any] | None = table()["classes"].get(kind) if isinstance(kind, str) else None
    return found


def refusals(config: Mapping[str, Any]) -> list[Refusal]:
    """Everything in a flat config that the engine stops at, in the order it would."""
    found: dict[str, Refusal] = {}
    for rule in (_model_type, _field_types, _sizes, _further, _dtype, rope_refusals):
        for refusal in rule(config):
            # the first fault of a key says enough
            found.setdefault(refusal.key.partition(".")[0], refusal)
    return list(found.values())


def target_refusals(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[Refusal]:
    """What the engine stops at in a target's config, as far as the tables go: types of known classes, and the dtype.

    Args:
        config: the whole config.
        text: its language model's part (the same for a model of text alone).
    """
    if config.get("auto_map"):
        return []  # read by code of its own
    # what a class needs of a draft's config it has a default for, or its own class of the engine does not read it
    types = list(_field_types(text, needs=False)) if config_class(text) is not None else []
    return types + list(_dtype(config if text is config else {**text, **config}))


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the engine counts for a config (of a target or a draft); None if it says nothing."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    form = rope.get("rope_type", rope.get("type"))
    own = "original_max_position_embeddings" in rope or form in ("llama3", "yarn", "longrope")
    factor = 1 if own or not is_number(rope.get("factor")) else rope["factor"]
    said = next((config[key] for key in (*LENGTHS, "max_position_embeddings") if config.get(key) is not None), None)
    counted = _count(said)
    return None if counted is None or not math.isfinite(factor * counted) else int(factor * counted)


def repaired(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what the engine refuses, so that the rest can be checked all the same.

    A whole number spelled as a float or as text keeps its value, anything else its class's default.
    """
    whole = dict(config)
    for refusal in refusals(config):
        key, _, inner = refusal.key.partition(".")
        value = config.get(key)
        if key == "eagle_config" and isinstance(value, Mapping):
            whole[key] = {name: item for name, item in value.items() if name != inner}
        elif _as_size(value) and key in SIZES:
            whole[key] = _as_size(value)
        elif key in ("dtype", "torch_dtype"):
            whole[key] = _plain_dtype(value)
        else:
            whole.pop(key, None)
    return whole


def _as_size(value: Any) -> int | None:
    if type(value) is float and value.is_integer() and value > 0:
        return int(value)
    return int(value) if isinstance(value, str) and value.isdecimal() and int(value) > 0 else None


def fits(value: Any, kinds: str) -> bool:
    """Whether a JSON value is of one of the types `kinds`, as transformers' strict classes count it."""
    return any(_fits(value, kind.strip()) for kind in kinds.split(" | "))


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(_fits(item, kind[5:-1]) for item in value)
    if kind.startswith("dict") or kind.endswith("Config"):
        return isinstance(value, dict)
    types = {"None": type(None), "int": int, "float": float, "bool": bool, "str": str, "list": list}
    # an integer is no float here, and a boolean no integer
    return type(value) is types.get(kind)


def _wanted(kinds: str) -> str:
    words = {"None": "null", "int": "an integer", "float": "a number with a fraction", "bool": "true or false"}
    names = [kind.strip() for kind in kinds.split(" | ")]
    said = [
        words.get(n, "a string" if n == "str" else "a list" if n.startswith("list") else "an object") for n in names
    ]
    return " or ".join(dict.fromkeys(said))


def _model_type(config: Mapping[str, Any]) -> Iterator[Refusal]:
    kind = config.get("model_type")
    fix = 'set model_type to "llama"'
    if "model_type" not in config:
        yield Refusal("model_type", "there is no model_type, by which transformers picks the config's class", fix)
    elif not isinstance(kind, str) or kind not in table()["model_types"]:
        yield Refusal("model_type", f"model_type is {shown(kind)}, which transformers does not know", fix)
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        yield Refusal(
            "architectures",
            f"architectures is {shown(names)}, not a list of class names",
            'set architectures to ["LlamaForCausalLMEagle3"]',
        )


def _field_types(config: Mapping[str, Any], *, needs: bool = True) -> Iterator[Refusal]:
    entry = config_class(config) or ANY_CLASS
    for key, declared in entry["types"].items():
        kinds = NARROWER.get((str(config.get("model_type")), key), declared)
        if key in config and not fits(config[key], kinds):
            wanted = _wanted(kinds)
            remove = config[key] is None and key not in entry["needs"]
            yield Refusal(
                key,
                f"{key} is {shown(config[key])}, but {entry['class']} takes {wanted}",
                f"remove {key}, or set it to {wanted}"
                if remove
                else f"set {key} to {_respelled(config[key], kinds) or wanted}",
            )
    for key in entry["needs"]:
        if needs and key not in config:
            yield Refusal(
                key, f"{key} is not set, and {entry['class']} has no default for it", f"set {key} as it was trained"
            )
    spread = config.get("initializer_range")
    if isinstance(spread, float) and "initializer_range" in entry["types"] and not 0.0 <= spread <= 1.0:
        yield Refusal(
            "initializer_range", f"initializer_range is {spread:g}, not within 0 and 1", "set initializer_range to 0.02"
        )


def _respelled(value: Any, kinds: str) -> str:
    """The value as the class wants it, where there is no doubt which it is."""
    if type(value) is float and value.is_integer() and "int" in kinds.split(" | "):
        return str(int(value))
    if type(value) is int and "float" in kinds.split(" | "):
        return f"{value}.0"
    return ""


def _sizes(config: Mapping[str, Any]) -> Iterator[Refusal]:
    for key in (*SIZES[:7], "max_position_embeddings"):
        value = config.get(key)
        if type(value) is int and value < 1:
            yield Refusal(key, f"{key} is {value}, which is not a size", f"set {key} as it was trained")
    for key, null in (("draft_vocab_size", True), ("target_hidden_size", False), ("num_aux_hidden_states", True)):
        value = config.get(key)
        if key not in config or (value is None and null) or (type(value) is int and value > 0):
            continue
        yield Refusal(
            key,
            f"{key} is {shown(value)}, but the engine reckons with it as a size",
            f"set {key} to a positive integer, or remove it" if key != "draft_vocab_size" else f"set {key} as trained",
        )
    width, heads, entry = config.get("hidden_size"), config.get("num_attention_heads"), config_class(config)
    if type(width) is int and type(heads) is int and entry and entry["divides"] and heads > 0 and width % heads:
        yield Refusal(
            "num_attention_heads",
            f"hidden_size {width} is no multiple of num_attention_heads {heads}, which {entry['class']} insists on",
            "set both as trained, and head_dim with them",
        )


def _further(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Keys that no type is declared for, and what trips over them."""
    for key in ("quantization_config", "compression_config", "id2label", "per_layer_config"):
        if config.get(key) is not None and not isinstance(config[key], dict):
            yield not_an_object(key, config[key])
    for key in ("id2label", "per_layer_config"):
        held = config.get(key)
        if isinstance(held, dict) and not all(name.strip().lstrip("+-").isdecimal() for name in held):
            yield Refusal(key, f"{key} is {shown(held)}, whose keys are not numbers", f"remove {key}")
    if config.get("auto_map", {}) not in ({}, [], "") and not isinstance(config["auto_map"], dict):
        yield not_an_object("auto_map", config["auto_map"])
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        if key in config and not isinstance(config[key], dict):
            yield not_an_object(key, config[key])
        elif key in ("text_config", "llm_config") and "num_attention_heads" not in config.get(key, SIZES):
            yield Refusal(key, f"{key} has no num_attention_heads, which the engine reads there", f"remove {key}")
    eagle = config.get("eagle_config")
    if eagle and not isinstance(eagle, dict):
        yield not_an_object("eagle_config", eagle)
    if isinstance(eagle, dict):
        yield from _layer_ids(eagle.get("eagle_aux_hidden_state_layer_ids"))
    if "num_labels" in config and not isinstance(config["num_labels"], int):
        yield Refusal("num_labels", f"num_labels is {shown(config['num_labels'])}, not an integer", "remove num_labels")
    for key in LENGTHS:
        if config.get(key) is not None and _count(config[key]) is None:
            yield Refusal(key, f"{key} is {shown(config[key])}, which counts no positions", f"remove {key}")
    yield from _layer_types(config)
    yield from _rotated_layers(config)


def _count(value: Any) -> float | None:
    """A number of positions as the engine takes it: a number, or one written as text."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else None
    return value if is_number(value) else None


def _layer_ids(ids: Any) -> Iterator[Refusal]:
    if (
        ids is not None
        and ids not in ("", {})
        and not (isinstance(ids, list) and all(isinstance(i, int | float) for i in ids))
    ):
        yield Refusal(
            "eagle_config.eagle_aux_hidden_state_layer_ids",
            f"eagle_aux_hidden_state_layer_ids is {shown(ids)}, which is not a list of layer ids",
            "write the ids as a list of integers",
        )


def _layer_types(config: Mapping[str, Any]) -> Iterator[Refusal]:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in LAYER_TYPES for kind in kinds):
        why = f"layer_types is {shown(kinds)}, not a list of attention types that transformers knows"
    elif type(layers) is int and len(kinds) != layers:
        why = f"layer_types names {len(kinds)} layers, num_hidden_layers says {layers}"
    else:
        return
    yield Refusal("layer_types", why, "remove layer_types: the engine's draft class does not read it")


def _rotated_layers(config: Mapping[str, Any]) -> Iterator[Refusal]:
    kinds, layers = config.get("no_rope_layers"), config.get("num_hidden_layers")
    if (
        config.get("model_type") == "smollm3"
        and isinstance(kinds, list)
        and type(layers) is int
        and len(kinds) < layers
    ):
        why = f"no_rope_layers names {len(kinds)} layers, num_hidden_layers says {layers}"
        yield Refusal("no_rope_layers", why, "remove no_rope_layers: the engine's draft class does not read it")


def _dtype(config: Mapping[str, Any]) -> Iterator[Refusal]:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    if value is None or (isinstance(value, str) and value in DTYPES):
        return
    yield Refusal(
        key,
        f"{key} is {shown(value)}, which is no dtype the engine computes in (it wants bfloat16, float16 or float32)",
        f'set {key} to "{_plain_dtype(value)}"',
    )


def _plain_dtype(value: Any) -> str:
    plain = value.removeprefix("torch.") if isinstance(value, str) else ""
    return plain if plain in DTYPES else "bfloat16"
