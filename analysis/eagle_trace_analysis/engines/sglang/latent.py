"""What SGLang 0.5.23's `Eagle3DeepseekV2ForCausalLM` loads: an EAGLE-3 draft with multi-head latent attention (MLA).

Read from `sglang/srt/models/kimi_k25_eagle3.py` and `deepseek_v2.py`; `tests/integration/test_engine_table.py` holds
these tables against the installed class. The names are those of `eagle_trace_analysis.engines.base.Engine`: what is
not said here is as the engine does it for its other class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from eagle_trace.families import EAGLE3_MLA
from eagle_trace.recording import names as recorded
from eagle_trace_analysis.engines import rotation
from eagle_trace_analysis.engines.base import Gap
from eagle_trace_analysis.engines.refusal import Refusal, is_number, shown
from eagle_trace_analysis.engines.sglang import accepts, schemes
from eagle_trace_analysis.engines.sglang import engine as plain
from eagle_trace_analysis.engines.sglang.accepts import config_class, positions, target_refusals
from eagle_trace_analysis.engines.sglang.classes import other_class
from eagle_trace_analysis.engines.sglang.engine import (
    ENGINE,
    NAME,
    READS,
    REPLACES_EMBEDDING,
    TITLE,
    canonical_name,
    captured_inputs,
    computes_nothing,
    copied_from_serving,
    copied_from_training,
    default_inputs,
    entering_norm,
    fc_norm,
    fed_width,
    ids_that_capture,
    last_input,
    layer_ids,
    layer_of,
    skips_fc,
    uses_aux_hidden_state,
)
from eagle_trace_analysis.engines.sglang.gaps import RESIDUAL
from eagle_trace_analysis.engines.sglang.kinds import LATENT, loads_kind, serves_kind
from eagle_trace_analysis.engines.sglang.schemes import SIDE_FILES, read_quantisation, scheme_of
from eagle_trace_analysis.engines.sglang.target_classes import (
    feeds_since,
    is_known_target,
    target_class,
    why_it_cannot_serve,
)
from eagle_trace_analysis.engines.sglang.words import WORDS, ids_unread
from eagle_trace_analysis.engines.sglang.written import flat_config
from eagle_trace_analysis.trainers.base import Training

ARCHITECTURE = LATENT
ARCHITECTURES = frozenset({ARCHITECTURE})
OTHER_NAMES: Mapping[str, Collection[str]] = {"vLLM": frozenset({"Eagle3DeepseekV3ForCausalLM"})}
FAMILY = EAGLE3_MLA.name
LAYER, MODEL_TYPE = "a layer with latent attention", "deepseek_v3"
STACKED = {**recorded.FUSED_ON_LOAD, "gate_up_proj": recorded.FUSED["gate_up_proj"]}
#: sizes of the attention, and what the config classes of DeepSeek's kin take where a config names none
ATTENTION = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128}  # fmt: skip
LAYER_SIZES = ("num_attention_heads", *ATTENTION, "hidden_size", "intermediate_size")
#: `model_type` of configs that have these defaults
DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder config with what transformers fills in where it is silent."""
    defaults = ATTENTION if str(config.get("model_type")) in DEEPSEEK else {}
    return {**defaults, **plain.with_defaults(config)}


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding that the class builds: of any scaling it makes DeepSeek's yarn."""
    rope = plain.rope_settings(config) | {"partial_rotary_factor": 1.0}
    rope.pop("rope_is_neox_style", None)
    if rope["rope_type"] != "default":
        rope["rope_type"] = "deepseek_yarn"
    if config.get("rope_interleave") is not None:
        rope["rope_interleave"] = bool(config["rope_interleave"])
    return rope


def rotation_fault(full: Mapping[str, Any]) -> Refusal | None:
    """Why the rotary embedding of a config with defaults cannot be computed with; None if it can."""
    width, rows = int(full["qk_rope_head_dim"]), int(full["max_position_embeddings"])
    return rotation.rotation_fault(rope_settings(full), width, rows, scores=True)


def norm_before_fc(config: Mapping[str, Any]) -> bool:  # noqa: ARG001 (the engine's other class reads it)
    """The class has no norm of all features together."""
    return False


def num_aux_hidden_states(config: Mapping[str, Any]) -> int:
    """How many target layers fc is built for: the class counts ids at the top of a config too, captured or not."""
    named = layer_ids(config)
    named = config.get("eagle_aux_hidden_state_layer_ids") if named is None else named
    return 3 if named is None else len(named)


def attention_words(full: Mapping[str, Any]) -> str:
    """The sizes of the attention in a config with defaults."""
    nope, rope, value, q_rank, kv_rank = (
        full.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    )
    heads = full["num_attention_heads"]
    return f"{heads} heads of {nope} + {rope}, values of {value}, latents of {q_rank} (queries) and {kv_rank}"


def parameters(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the class holds for a flat config, unfused, by the names that a checkpoint stores."""
    full = with_defaults(config)
    hidden, middle, heads = (int(full[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    q_rank, kv_rank, nope, rope, value = (int(full.get(key) or 0) for key in ATTENTION)
    width, aux = int(full.get("target_hidden_size") or hidden), num_aux_hidden_states(full)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (int(full["vocab_size"]), hidden),
        "fc.weight": (hidden, width * aux),
    }
    if full.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if fc_norm(full):
        shapes |= {f"fc_norm.{k}.weight": (width,) for k in range(aux)}
    own = {
        "self_attn.q_a_proj.weight": (q_rank, 2 * hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, 2 * hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
        "input_layernorm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"layers.0.{name}": shape for name, shape in own.items()}
    shapes["norm.weight"] = (hidden,)
    if not full["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (int(full.get("draft_vocab_size") or full["vocab_size"]), hidden)
    return shapes


def destinations(name: str, known: Collection[str]) -> tuple[str, ...]:
    """The parameters a stored tensor is loaded into; none if it is dropped (`recorded.latent_fills`)."""
    filled = recorded.latent_fills(name)
    return filled if all(part in known or part in recorded.MAPS for part in filled) else ()


# ---- what it stops at ------------------------------------------------------------------------------------------------


def refusals(config: Mapping[str, Any]) -> list[Refusal]:
    """Everything in a flat config that the engine stops at."""
    found = [_of_this_class(one) for one in accepts.refusals(_without_unread(config))]
    keys = {one.key for one in found}
    return found + [one for one in _own_refusals(config) if one.key not in keys]


def _without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with 1 for what llama3's form divides by: this class takes it for its own yarn, and does not."""
    read = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), Mapping):
            unread = {key: 1.0 for key in rope if key.endswith("_freq_factor") and is_number(rope[key])}
            read[name] = {**rope, **unread}
    return read


def _of_this_class(refusal: Refusal) -> Refusal:
    fix = refusal.fix.replace('model_type to "llama"', f'model_type to "{MODEL_TYPE}"')
    return replace(refusal, fix=fix.replace(plain.ARCHITECTURE, ARCHITECTURE))


def _own_refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    full = with_defaults(accepts.repaired(config))
    for key in ATTENTION:
        # a null is no size either, whatever the default
        value = config.get(key) if key in config else full.get(key)
        if key == "q_lora_rank" and key in config and value is None:
            why = "q_lora_rank is null: the class has no form whose queries are projected at once (q_proj)"
            yield Refusal(key, why, "retrain with a q_lora_rank")
        elif type(value) is not int or value < 1:
            yield Refusal(key, f"{key} is {shown(value)}, which the class reckons with", f"set {key} as trained")
    layers = config.get("num_hidden_layers", full["num_hidden_layers"])
    if layers != 1:
        yield Refusal(
            "num_hidden_layers",
            f"num_hidden_layers is {shown(layers)}, and the class computes one layer",
            "set num_hidden_layers to 1",
        )


def repaired(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what the engine stops at; a draft vocabulary that is not named is the target's, as a null."""
    whole = accepts.repaired(config) | {"num_hidden_layers": 1}
    for refusal in _own_refusals(whole):
        whole.pop(refusal.key, None)
    return {"draft_vocab_size": None, **whole}


def quantisation_refused(said: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the engine does not start with a quantisation, and the way out."""
    refused = schemes.quantisation_refused(said)
    if refused is None and not any("kv_b_proj" in str(one) for one in _ignored(said)):
        why = f"{ARCHITECTURE} splits kv_b_proj on loading, which it cannot where that is quantised"
        return why, "leave kv_b_proj in bfloat16, and name it among the modules that are not quantised"
    return refused


def _ignored(said: Mapping[str, Any]) -> list[Any]:
    keys = ("ignore", "ignored_layers", "exclude_modules", "modules_to_not_convert")
    return [one for key in keys for one in (said.get(key) or ()) if isinstance(said.get(key), list)]


def gaps(training: Training) -> list[Gap]:
    """One entry per trained setting that the class cannot compute."""
    layer = training.decoder
    retrain = f"retrain with {LAYER} (silu, no biases)"
    found = [RESIDUAL] if training.norm_before_residual else []
    if training.own_embedding:
        why = f"the draft trained its own embedding: {TITLE} replaces it with the target's"
        found.append(Gap("embedding", why, "train without embed_requires_grad"))
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        found.append(Gap("bias", f"the decoder layer has biases: {ARCHITECTURE} loads none", retrain))
    activation = layer.get("hidden_act", "silu")
    if activation != "silu":
        found.append(Gap("activation", f"the activation is {activation}: {ARCHITECTURE} has silu only", retrain))
    return found
