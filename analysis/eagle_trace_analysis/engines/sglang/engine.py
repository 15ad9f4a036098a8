"""What SGLang 0.5.23's `LlamaForCausalLMEagle3` loads, written down: this package imports no engine.

Read from `sglang/srt/models/llama_eagle3.py` and the target classes beside it.
`tests/integration/test_engine_table.py`
holds these tables against the installed engine, so that another version shows as a failing test.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eagle_trace.families import EAGLE3
from eagle_trace.recording import names as recorded
from eagle_trace_analysis.engines import rotation
from eagle_trace_analysis.engines.refusal import Refusal
from eagle_trace_analysis.engines.sglang import accepts

NAME, TITLE = "sglang", "SGLang"
ENGINE = f"{TITLE} 0.5.23"
#: what a stored name means, and what a fused tensor fills: the same for the recorders
canonical_name = recorded.canonical_name
STACKED = recorded.FUSED
ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = frozenset({ARCHITECTURE})
FAMILY = EAGLE3.name
LAYER, MODEL_TYPE = "a llama layer", "llama"
LAYER_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size")
#: formats of trainers that the engine reads as they are
READS: frozenset[str] = frozenset()
#: a draft of the target's width computes with the target's embedding, whatever it ships
REPLACES_EMBEDDING = True
#: what other engines call a draft with the very same layer
OTHER_NAMES = {
    "vLLM": frozenset({
        "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM",
    }),
}  # fmt: skip

#: no draft has more layers; a config that counts more is wrong, and its parameters are not all listed
MOST_LAYERS = 1000
#: target classes that shift layer ids only if the first is 1, and take any other list as it is
SHIFT_IF_FIRST_IS_1 = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration",
})  # fmt: skip
#: adds one to the default layers too
DEFAULT_ONE_LATER = frozenset({"MiniMaxM3SparseForConditionalGeneration"})
#: takes a list as it is if it names the final hidden state, which it alone captures
FINAL_STATE_TARGETS = frozenset({"GptOssForCausalLM"})


#: `intermediate_size_mlp` of a llama4_text config that names none
LLAMA4_WIDTH = 16384


def class_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the class that `model_type` picks takes where a config is silent; llama's for what is not known here."""
    entry = accepts.config_class(config) or {"defaults": {}}
    known = accepts.table()["classes"]["llama"]["defaults"] | entry["defaults"]
    return {key: value for key, value in known.items() if value is not None}


def default_theta(config: Mapping[str, Any]) -> float:
    """The RoPE base of a config that names none."""
    entry = accepts.config_class(config)
    return float(entry["theta"] if entry and entry["theta"] else 10000.0)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder config with what transformers fills in where it is silent."""
    full = class_defaults(config) | {key: value for key, value in config.items() if value is not None}
    for key in ("num_key_value_heads", "head_dim"):
        if key in config and config[key] is None:
            # a null is worked out from the other keys, whatever the class's default
            full.pop(key, None)
    entry = accepts.config_class(config)
    full |= entry["imposes"] if entry else {}
    if config.get("model_type") == "llama4_text":
        # the engine's draft class reads this key for that family
        full["intermediate_size"] = full.get("intermediate_size_mlp", LLAMA4_WIDTH)
    full.setdefault("num_key_value_heads", full["num_attention_heads"])
    full.setdefault("head_dim", full["hidden_size"] // max(full["num_attention_heads"], 1))
    return full


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding a config asks for, in one form for the old keys and the new."""
    # transformers takes the old key where a config has both
    entry = accepts.config_class(config) or {"share": 1.0, "reads_rope": True, "rope": {}}
    given = config.get("rope_scaling") or config.get("rope_parameters")
    # an empty object is a plain embedding; without one the class may have a form of its own
    rope = dict(entry["rope"] if given is None else given)
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", default_theta(config) if theta is None else theta)
    if not entry["reads_rope"]:
        rope = {"rope_theta": 10000.0}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if "mrope_section" in rope:
        rope["rope_type"] = "default"
    # the share is read at the top of the config; one inside the object of the rotary embedding is not
    share = config.get("partial_rotary_factor")
    rope["partial_rotary_factor"] = entry["share"] if share is None else share
    if not config.get("rope_is_neox_style", True):
        rope["rope_is_neox_style"] = False
    return {key: value for key, value in rope.items() if value is not None}


def rotation_fault(full: Mapping[str, Any]) -> Refusal | None:
    """Why the rotary embedding of a config with defaults cannot be computed with; None if it can."""
    rope, own = rope_settings(full), full.get("original_max_position_embeddings")
    rope.pop("attention_factor", None)  # transformers' and vLLM's
    if own and rope["rope_type"] != "default":
        rope["original_max_position_embeddings"] = own
    return rotation.rotation_fault(rope, int(full["head_dim"]), int(full["max_position_embeddings"]))


def eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `eagle_config` object of a flat config (empty if there is none)."""
    value = config.get("eagle_config")
    return value if isinstance(value, Mapping) else {}


def layer_ids(config: Mapping[str, Any]) -> Any:
    """The layer ids that the engine reads, as they stand in the config; it reads none at the top level."""
    return eagle_config(config).get("eagle_aux_hidden_state_layer_ids")


def uses_aux_hidden_state(config: Mapping[str, Any]) -> bool:
    """Whether the engine captures several target layers for this draft (with the algorithm EAGLE3)."""
    return bool(eagle_config(config).get("use_aux_hidden_state", True))


def num_aux_hidden_states(config: Mapping[str, Any]) -> int:
    """How many target layers the draft's fc is built for."""
    explicit = config.get("num_aux_hidden_states")
    if explicit is not None:
        return int(explicit)
    return len(layer_ids(config) or ()) or 3


def fed_width(config: Mapping[str, Any]) -> int:
    """Width of what the engine feeds the draft, by its config alone (the target's may be another)."""
    full = with_defaults(config)
    width = int(full.get("target_hidden_size", full["hidden_size"]))
    if not uses_aux_hidden_state(full):
        return width
    return width * (len(layer_ids(full) or ()) or 3)


def skips_fc(config: Mapping[str, Any]) -> bool:
    """Whether the engine leaves out fc and the norms before it: what it feeds is as wide as the embedding."""
    return fed_width(config) == int(with_defaults(config)["hidden_size"])


def norm_before_fc(config: Mapping[str, Any]) -> bool:
    """Whether the engine normalises the concatenated features before fc."""
    return bool(eagle_config(config).get("norm_before_fc", config.get("norm_before_fc", False)))


def fc_norm(config: Mapping[str, Any]) -> bool:
    """Whether the engine normalises each feature before fc."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm", False))


def default_inputs(layers: int) -> list[int]:
    """The engine's guess, which is what trainers take as well."""
    return [2, layers // 2, layers - 3]


def captured_inputs(config: Mapping[str, Any], layers: int | None, target_architecture: str | None) -> list[int] | None:
    """The target layers whose *input* the engine feeds the draft, or None if that is not to be known.

    The input of layer i is what Hugging Face calls `hidden_states[i]`.

    Args:
        config: the draft's flat config.
        layers: number of the target's layers.
        target_architecture: the target's class; None takes the rule of most classes (id + 1).
    """
    named = layer_ids(config)
    if named is None:
        later = int(target_architecture in DEFAULT_ONE_LATER)
        return None if layers is None else [i + later for i in default_inputs(layers)]
    ids = [int(i) for i in named]
    if target_architecture in SHIFT_IF_FIRST_IS_1 and ids and ids[0] != 1:
        return sorted(ids)
    if target_architecture in FINAL_STATE_TARGETS and ids and max(ids) == layers:
        return sorted(ids)
    # layers are captured as they run, whatever the order of the list
    return sorted(i + 1 for i in ids)


def last_input(layers: int, target_architecture: str | None) -> int:
    """The last layer of a target whose input can be fed; that behind the last one is the final hidden state."""
    return layers if target_architecture in FINAL_STATE_TARGETS else layers - 1


def ids_that_capture(inputs: Sequence[int], layers: int | None, target_architecture: str | None) -> list[int] | None:
    """The layer ids that make the engine capture these inputs, written in a flat config; None if none do."""
    swapped = [*inputs[1::-1], *inputs[2:]]
    # a list that begins with 1 is shifted by every class, so the last of these names the layers another way round
    for ids in ([i - 1 for i in inputs], list(inputs), swapped):
        config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        if min(ids, default=0) >= 0 and captured_inputs(config, layers, target_architecture) == list(inputs):
            return ids
    return None


def copied_from_serving(ids: Sequence[int], layers: int | None, target_architecture: str | None) -> int | None:
    """Whether speculators ids look like a serving config's, copied as they are: the number of layers they fit, or None.

    They do if they are what makes the engine feed speculators' default ([1, L/2 - 1, L - 4] for most classes). Without
    the target's layers, L is taken from the last id.
    """
    counted = layers if layers is not None else (ids[-1] + 4 if ids else 0)
    if counted < 8 or list(ids) == default_inputs(counted):
        return None
    # with the target unknown, the rule of most classes
    right = ids_that_capture(default_inputs(counted), counted, target_architecture)
    return counted if list(ids) == right else None


def copied_from_training(ids: Sequence[int]) -> int | None:
    """Whether serving ids look like speculators' default, copied as it is: the number of layers it fits, or None."""
    counted = ids[-1] + 3 if ids else 0
    return counted if counted >= 8 and list(ids) == default_inputs(counted) else None


def attention_words(full: Mapping[str, Any]) -> str:
    """The sizes of the attention in a config with defaults."""
    queries, keys, width = (full[key] for key in LAYER_SIZES[:3])
    return f"{queries} heads, {keys} key-value heads of {width}"


def parameters(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the class holds for a flat config, unfused and as speculators spells them.

    `embed_tokens.weight` is among them, though SGLang replaces it by the target's after loading. With tied
    embeddings
    there is no `lm_head.weight`. Padding of the vocabulary (to a multiple of 64) is left out.
    """
    full = with_defaults(config)
    hidden, middle = int(full["hidden_size"]), int(full["intermediate_size"])
    width = int(full.get("target_hidden_size", hidden))
    aux = num_aux_hidden_states(full)
    queries = int(full["num_attention_heads"]) * int(full["head_dim"])
    keys = int(full["num_key_value_heads"]) * int(full["head_dim"])
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (int(full["vocab_size"]), hidden),
        "fc.weight": (hidden, width * aux),
    }
    if full.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if norm_before_fc(full):
        shapes["input_norm.weight"] = (width * aux,)
    if fc_norm(full):
        shapes |= {f"fc_norm.{k}.weight": (width,) for k in range(aux)}
    for layer in range(min(int(full["num_hidden_layers"]), MOST_LAYERS)):
        entering = 2 * hidden if layer == 0 else hidden
        own = {
            "self_attn.q_proj.weight": (queries, entering),
            "self_attn.k_proj.weight": (keys, entering),
            "self_attn.v_proj.weight": (keys, entering),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (middle, hidden),
            "mlp.up_proj.weight": (middle, hidden),
            "mlp.down_proj.weight": (hidden, middle),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "hidden_norm.weight": (hidden,),
        }
        if full["attention_bias"] or full.get("bias"):
            # q, k and v are rebuilt without a bias; the output projection keeps the base class's
            own["self_attn.o_proj.bias"] = (hidden,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["norm.weight"] = (hidden,)
    if not full["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (int(full.get("draft_vocab_size", full["vocab_size"])), hidden)
    return shapes


def layer_of(name: str) -> int | None:
    """The decoder layer a stored tensor belongs to, None for one outside the layers."""
    found = re.match(r"layers\.(\d+)\.", canonical_name(name))
    return int(found.group(1)) if found else None


def computes_nothing(name: str) -> bool:
    """Whether a tensor that is dropped is missed by nothing: tables rebuilt on start, copies of the verifier's own."""
    return bool(
        re.search(r"rotary_emb\.|\.(masked_)?bias$(?<=attn\.bias)|\.masked_bias$|(^|\.)verifier_(norm|lm_head)\.", name)
    )


def entering_norm(name: str) -> str | None:
    """The engine's name of the norm that a layer behind the first starts with, of speculators' name for it; else None.

    speculators' later layers are plain decoder layers with an `input_layernorm`. The engine's class has one too, loads
    it and never uses it: what it applies is a `hidden_norm`.
    """
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.input_layernorm\.weight", name)
    return f"{later.group(1)}.hidden_norm.weight" if later else None


def destinations(name: str, known: Collection[str]) -> tuple[str, ...]:
    """The parameters (keys of `parameters`) a stored tensor is loaded into; none if it is dropped.

    A fused tensor (`qkv_proj`, `gate_up_proj`) fills all of its parts. `d2t` and `t2d` are returned as such: the first
    becomes hot_token_id, the second is ignored on purpose.
    """
    canonical = canonical_name(name)
    if canonical in known or canonical in ("d2t", "t2d"):
        return (canonical,)
    names = recorded.fills(name)
    return names if all(part in known for part in names) else ()
