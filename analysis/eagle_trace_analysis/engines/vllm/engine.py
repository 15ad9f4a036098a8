"""What vLLM 0.32.0's EAGLE-3 classes load, written down: this package imports no engine.

Read from `vllm/model_executor/models/llama_eagle3.py`, `qwen3_eagle3.py`, `transformers_utils/configs/speculators` and
both model runners; `tests/vllm/test_engine_table.py` holds these tables against the installed engine. What vLLM takes
from transformers as SGLang does (types of a config's keys, rotary embeddings, defaults of decoder configs) is taken
from SGLang's table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eagle_trace.checkpoints import class_names
from eagle_trace.recording import names as recorded
from eagle_trace_analysis.engines import rotation
from eagle_trace_analysis.engines.base import Engine, Gap
from eagle_trace_analysis.engines.refusal import Refusal, shown
from eagle_trace_analysis.engines.sglang import accepts
from eagle_trace_analysis.engines.sglang import engine as shared
from eagle_trace_analysis.engines.sglang.written import decoder_keys
from eagle_trace_analysis.trainers.base import Training

NAME, TITLE = "vllm", "vLLM"
ENGINE = f"{TITLE} 0.32.0"
STACKED = recorded.FUSED
ARCHITECTURE, QWEN3 = "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"
#: every name that one of the two classes is registered under
ARCHITECTURES = frozenset({
    ARCHITECTURE, QWEN3, "LlamaForCausalLMEagle3", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
})  # fmt: skip
OTHER_NAMES: Mapping[str, Collection[str]] = {}
FAMILY, LAYER, MODEL_TYPE, LAYER_SIZES = shared.FAMILY, shared.LAYER, shared.MODEL_TYPE, shared.LAYER_SIZES
#: formats that the engine reads as they are
READS = frozenset({"speculators"})
#: keys of a rotary embedding that SGLang reads and this engine does not
UNREAD_OF_ROPE = frozenset({"attn_factor", "extrapolation_factor"})
#: the target's embedding is shared only where the draft ships none, or the same
REPLACES_EMBEDDING = False

with_defaults = shared.with_defaults
attention_words = shared.attention_words
rope_settings = shared.rope_settings
default_inputs = shared.default_inputs
layer_of = shared.layer_of
canonical_name = shared.canonical_name
computes_nothing = shared.computes_nothing
uses_aux_hidden_state = shared.uses_aux_hidden_state
norm_before_fc = shared.norm_before_fc


def rotation_fault(full: Mapping[str, Any]) -> Refusal | None:
    """Why the rotary embedding of a config with defaults cannot be computed with; None if it can."""
    rope = {key: value for key, value in rope_settings(full).items() if key not in UNREAD_OF_ROPE}
    share = rope["partial_rotary_factor"]
    if not 0 < share <= 1:
        why = f"partial_rotary_factor is {shown(share)}: {TITLE} stops at what is not a share of a head"
        return Refusal("partial_rotary_factor", why, "remove partial_rotary_factor, or set it as trained")
    if rope["rope_type"] == "dynamic" and "alpha" not in rope and "max_trained_positions" not in rope:
        rope["factor"] = 1.0  # its base grows with what exceeds the trained positions, which is nothing then
    return rotation.rotation_fault(rope, int(full["head_dim"]), int(full["max_position_embeddings"]))


def is_qwen3(config: Mapping[str, Any]) -> bool:
    """Whether the class with Qwen3 layers serves a flat config: its name says so, not its `model_type`."""
    return QWEN3 in class_names(config)


def config_class(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What is known of the config class that `model_type` picks; the engine picks its own class by `architectures`."""
    entry = accepts.config_class(config)
    return None if entry is None else {**entry, "loads": True}


def fc_norm(config: Mapping[str, Any]) -> bool:
    """Whether each feature is normalised before fc."""
    return bool(config.get("fc_norm"))


def layer_ids(config: Mapping[str, Any]) -> Any:
    """The layer ids that both model runners read: at the top level. Those of `eagle_config` V2 ignores."""
    return config.get("eagle_aux_hidden_state_layer_ids") or shared.layer_ids(config)


def num_aux_hidden_states(config: Mapping[str, Any]) -> int:
    """How many target layers fc is built for. Llama's class does not count ids at the top level; Qwen3's does."""
    explicit = config.get("num_aux_hidden_states")
    if explicit is not None:
        return int(explicit)
    ids = layer_ids(config) if is_qwen3(config) else shared.layer_ids(config)
    return len(ids or ()) or 3


def fed_width(config: Mapping[str, Any]) -> int:
    """Width of what the draft is fed, by its config alone."""
    full = with_defaults(config)
    width = int(full.get("target_hidden_size") or full["hidden_size"])
    return width * (len(set(layer_ids(config) or ())) or 3) if uses_aux_hidden_state(full) else width


def skips_fc(config: Mapping[str, Any]) -> bool:
    """Whether fc is left out: only where the config says so."""
    return not uses_aux_hidden_state(config)


def captured_inputs(config: Mapping[str, Any], layers: int | None, target: str | None) -> list[int] | None:  # noqa: ARG001
    """Target layers whose inputs are fed: the ids as they are, each once, in the order the layers run."""
    named = layer_ids(config)
    if named is None:
        return None if layers is None else default_inputs(layers)
    return sorted({int(i) for i in named})


def ids_that_capture(inputs: Sequence[int], layers: int | None, target: str | None) -> list[int] | None:  # noqa: ARG001
    """The ids to write so that the inputs of these layers are fed: themselves, if they are in order."""
    return list(inputs) if list(inputs) == sorted(set(inputs)) and min(inputs, default=0) >= 0 else None


def copied_from_serving(ids: Sequence[int], layers: int | None, target: str | None) -> int | None:
    """Whether ids look like SGLang's, copied: the number of layers they fit, or None."""
    return shared.copied_from_serving(ids, layers, target)


def copied_from_training(ids: Sequence[int]) -> int | None:  # noqa: ARG001
    """A training's ids are this engine's own."""
    return None


def last_input(layers: int, target: str | None) -> int:  # noqa: ARG001
    """The last layer of a target whose input can be fed; one behind it is the final hidden state."""
    return layers


def parameters(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the class holds for a flat config, unfused and as speculators spells them."""
    full = with_defaults(config)
    plain = {**full, "tie_word_embeddings": False, "attention_bias": False, "bias": False}
    shapes = dict(shared.parameters(plain | {"num_aux_hidden_states": num_aux_hidden_states(full)}))
    if not uses_aux_hidden_state(full):
        shapes.pop("fc.weight")
    for layer in range(1, min(int(full["num_hidden_layers"]), shared.MOST_LAYERS)):
        shapes.pop(f"layers.{layer}.hidden_norm.weight")
    if is_qwen3(config):
        head = (int(full["head_dim"]),)
        names = (f"layers.{n}.self_attn.{part}_norm.weight" for n in range(full["num_hidden_layers"]) for part in "qk")
        shapes |= dict.fromkeys(names, head)
    return shapes


def entering_norm(name: str) -> str | None:  # noqa: ARG001
    """A later layer starts with `input_layernorm`, as in training."""
    return None


def destinations(name: str, known: Collection[str]) -> tuple[str, ...]:
    """The parameters (keys of `parameters`) a stored tensor is loaded into; none if the engine does not know it."""
    return shared.destinations(name, known)


def gaps(training: Training) -> list[Gap]:
    """What of a training the engine has no form of."""
    layer = training.decoder
    kind, activation = layer.get("model_type", "llama"), layer.get("hidden_act", "silu")
    found = []
    if kind not in ("llama", "qwen3"):
        why = f"the decoder layer is {kind}: {TITLE}'s draft classes compute llama and qwen3 layers"
        found.append(Gap("decoder", why, "retrain with a llama or qwen3 layer"))
    if layer.get("mlp_bias"):
        why = f"the decoder layer has biases: {TITLE}'s draft classes load none in the MLP"
        found.append(Gap("bias", why, "retrain without mlp_bias"))
    if activation != "silu":
        why = f"the activation is {activation}: {TITLE}'s draft classes have silu only"
        found.append(Gap("activation", why, "retrain with silu"))
    return found


def flat_config(training: Training, ids: Sequence[int], dtype: str) -> dict[str, Any]:
    """The flat config that makes the engine serve a draft as it was trained, with `ids` as `ids_that_capture` gives."""
    kind = training.decoder.get("model_type", "llama")
    return decoder_keys(training.decoder) | {
        "architectures": [QWEN3 if kind == "qwen3" else ARCHITECTURE],
        "model_type": kind,
        "draft_vocab_size": training.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "num_aux_hidden_states": len(ids),
        "norm_before_residual": training.norm_before_residual,
        "norm_before_fc": training.norm_before_fc,
        "fc_norm": training.fc_norm,
        "norm_output": training.norm_output,
    }


def quantisation_refused(said: Mapping[str, Any]) -> tuple[str, str] | None:  # noqa: ARG001
    """Which quantisation configs stop the engine is not known here."""
    return None


def scheme_of(said: Mapping[str, Any]) -> str:
    """What the engine then holds is not known here."""
    return f"what {ENGINE} loads under {said.get('quant_method') or 'no quant_method'} is not known here"


def other_class(config: Mapping[str, Any]) -> Engine | None:  # noqa: ARG001 (SGLang's has tables for another)
    """No other class has tables here."""
    return None
