"""What the static check says of configs and classes, judged by the installed SGLang's own loader.

SGLang is imported once, in a process of its own; no engine is started. Every cell is one config: what the engine stops
at must be what `accepts.refusals` names, key by key and value by value, and what it takes must be read as it reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines import SGLANG, rotation
from eagle_trace_analysis.engines.sglang import accepts, engine
from eagle_trace_analysis.engines.sglang.target_classes import NO_CAPTURE, NO_EMBEDDING, SERVES
from tests.support import checkpoints as make
from tests.support import config_classes, rope_numbers
from tests.support.check_cases import Folders, troubles, write_healthy
from tests.support.check_cases import flat_config as flat_of
from tests.support.config_cases import ACCEPTED, FLAT_FAULTS, NAMED, REFUSED
from tests.support.config_classes import MODEL_TYPES, flat_config, write_config
from tests.support.engine_judge import ask
from tests.support.pairs import DRAFT, TARGET
from tests.support.target_cases import TARGETS
from tests.support.warm.start import Warm

pytest.importorskip("sglang")
pytestmark = pytest.mark.integration

GONE = object()
VALUES = [
    None, True, False, 0, 1, 2, -1, 0.0, 1.0, 0.5, 1.5, "1", "x", "", [], [1], ["a"], ["full_attention"], {}, {"a": 1},
]  # fmt: skip
#: keys with a declared type, keys SGLang reads besides, and some that nobody reads
KEYS = (
    *accepts.table()["classes"]["llama"]["types"], "rope_scaling", "rope_theta", "partial_rotary_factor",
    "model_type", "dtype", "torch_dtype", "transformers_version", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "num_labels",
    "name_or_path", "output_attentions", "attn_implementation", "per_layer_config", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "original_max_position_embeddings", "draft_vocab_size", "eagle_config",
    "target_hidden_size", "num_aux_hidden_states", "bias", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output",
    "quantization_config", "compression_config", "tokenizer_class", "auto_map", "text_config", "llm_config",
    "num_nextn_predict_layers", "rope_is_neox_style",
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "temperature",
    "max_length", "qkv_bias", "unknown_key",
)  # fmt: skip
#: what the class stops at by a check of its own, elsewhere in the static check
ELSEWHERE = ("hidden_act", "architectures", "draft_vocab_size")

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 1024},
    "su": {},
    "ntk": {},
    "mrope": {},
    "deepseek_yarn": {"factor": 4.0},
    "proportional": {},
}


def old_config(**changes: Any) -> dict[str, Any]:
    """The flat config with the keys of older transformers."""
    kept = {key: value for key, value in flat_config().items() if key not in ("rope_parameters", "dtype")}
    return kept | {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"} | changes


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key} | ({} if value is GONE else {key: value})


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every config that is judged, with a name that says what is odd about it."""
    yield "nothing", flat_config()
    for key in KEYS:
        for value in (*VALUES, GONE):
            yield f"{key}={'gone' if value is GONE else json.dumps(value)}", changed(flat_config(), key, value)
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "dtype", "rope_parameters"):
        for value in VALUES:
            yield f"old keys, {key}={json.dumps(value)}", old_config(**{key: value})
    for name in (*sorted(accepts.DTYPES), "torch.float16", "bf16", "auto", "nn", "Tensor", "int8", "complex64"):
        yield f"torch_dtype={name}", old_config(torch_dtype=name)
    for key in ("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"):
        for value in (*VALUES, [1, 14.0, 26]):
            yield f"eagle_config.{key}={json.dumps(value)}", flat_config(eagle_config={key: value})
    yield from rope_cells()
    for kind in MODEL_TYPES[1:]:
        for key, kinds in accepts.table()["classes"][kind]["types"].items():
            for value in (None, True, 1, 0.5, "x", [], {}):
                if accepts.table()["classes"][kind]["loads"] and "Config" not in kinds:
                    yield f"{kind}, {key}={json.dumps(value)}", changed(flat_config(model_type=kind), key, value)
    for heads, width in ((3, 64), (5, 64), (4, 66), (8, 64)):
        sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "hidden_size": width}
        yield f"{heads} heads of {width}", flat_config(**sizes)


def rope_cells() -> Iterator[tuple[str, dict[str, Any]]]:
    for form, settings in ROPES.items():
        for spelling in ("rope_type", "type"):
            for key in ("rope_scaling", "rope_parameters"):
                yield f"{key} {spelling} {form}", old_config(**{key: {spelling: form} | settings})
        sections = {"rope_type": form, "mrope_section": [2, 3, 3]} | settings
        yield f"sections, {form}", old_config(rope_scaling=sections)
        whole = {"rope_type": form, "rope_theta": 1e4} | settings
        for key in ("factor", *settings):
            for value in (GONE, None, "8", True, 0, 8, 2.0, [1], {"a": 1}):
                if key in settings:
                    rope = changed(whole, key, value)
                    text = "gone" if value is GONE else json.dumps(value)
                    yield f"{form}, {key}={text}", flat_config(rope_parameters=rope)
    for key in ("rope_theta", "rope_type", "partial_rotary_factor"):
        for value in VALUES:
            rope = {"rope_type": "default", "rope_theta": 1e4} | {key: value}
            yield f"rope_parameters.{key}={json.dumps(value)}", flat_config(rope_parameters=rope)


#: beta_fast and beta_slow: the usual ones, Kimi-K2's, and the wrong way round
RAMPS = [(32, 1), (32.0, 1.0), (1.0, 1.0), (32, 32), (1, 32), (1.0, 8.0)]
Judged = list[tuple[str, dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


def whole_folders(root: Path, healthy: Folders) -> dict[str, Path]:
    """Drafts with weights, by name: the healthy one, every planted fault of a config, and the demo's."""
    changes = {f"refused {json.dumps(case[0])}": case[0] for case in REFUSED}
    changes |= {f"accepted {json.dumps(case)}": case for case in ACCEPTED}
    changes |= {f"model type {kind}": NAMED | {"model_type": kind} for kind in MODEL_TYPES}
    changes |= {
        f"model type {kind}, {key} left out": NAMED | {"model_type": kind, key: GONE}
        for kind in MODEL_TYPES
        for key in ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act")
    }
    export(DRAFT, root / "demo", target=TARGET)
    found = {"healthy": healthy.flat, "demo": root / "demo"}
    for name, change in changes.items():
        config = {key: value for key, value in (flat_of(healthy) | change).items() if value is not GONE}
        found[name] = make.write_checkpoint(root / str(len(found)), config, make.draft_tensors())
    for name, harm, *_ in FLAT_FAULTS:
        config, tensors = flat_of(healthy), make.draft_tensors()
        harm(config, tensors)
        found[f"fault {name}"] = make.write_checkpoint(root / str(len(found)), config, tensors)
    return found


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory, healthy: Folders, warm: Warm) -> dict[str, Any]:
    """Every cell's verdict, those of whole folders, and the registry of target classes."""
    folder = tmp_path_factory.mktemp("judge")
    configs = list(cells())
    drafts = [write_config(folder / str(number), config) for number, (_, config) in enumerate(configs)]
    whole = whole_folders(folder / "whole", healthy)
    model = make.write_checkpoint(folder / "model", make.decoder_config(1), make.target_tensors())
    targets = [str(write_config(folder / "targets" / name, config)) for name, (config, _) in TARGETS.items()]
    ropes = [
        str(write_config(folder / "ropes" / str(number), config))
        for number, (_, config) in enumerate(rope_numbers.cells())
    ]
    with warm():
        given = ask(
            folder / "exchange", model, [*drafts, *whole.values()], registry=True, targets=targets, rotations=ropes,
            ramps=RAMPS,
        )  # fmt: skip
    verdicts = given["verdicts"]
    return given | {
        "judged": [(*cell, verdict) for cell, verdict in zip(configs, verdicts, strict=False)],
        "whole": {
            name: (path, verdict) for (name, path), verdict in zip(whole.items(), verdicts[len(configs) :], strict=True)
        },
    }


def stops(config: dict[str, Any]) -> list[str]:
    """What the static check names as the reasons for the engine to stop, whichever check says it."""
    act = engine.with_defaults(accepts.repaired(config))["hidden_act"]
    found = [refusal.key for refusal in accepts.refusals(config)]
    entry = accepts.config_class(config)
    if act != "silu":
        found.append("hidden_act")
    if "draft_vocab_size" not in config and not engine.with_defaults(config).get("tie_word_embeddings"):
        found.append("draft_vocab_size")
    if entry is not None and not entry["loads"]:
        found.append("model_type")
    return found


def is_senseless(config: dict[str, Any]) -> bool:
    """No draft was trained so, though the engine builds something: a size of nothing, a class name that is none."""
    counted = (*accepts.SIZES, "max_position_embeddings")
    return isinstance(config.get("architectures"), str) or any(
        (type(config.get(key)) in (bool, int) and config[key] < 1) or config.get(key) is True for key in counted
    )


def is_quantised(config: dict[str, Any]) -> bool:
    """Methods of quantisation have a check of their own (and a judge: test_tensor_judge.py)."""
    return any(isinstance(config.get(key), dict) for key in ("quantization_config", "compression_config"))


def test_what_the_engine_stops_at_is_what_the_check_names(answer: dict[str, Any]) -> None:
    wrong = [
        f"{name}: named {stops(config)}, but the engine says {str(verdict['error'])[:150]}"
        for name, config, verdict in answer["judged"]
        if bool(stops(config)) != (verdict["error"] is not None)
        and not is_senseless(config)
        and not is_quantised(config)
    ]
    assert not wrong, f"{len(wrong)} of {len(answer['judged'])} cells:\n" + "\n".join(wrong[:80])


def test_a_rotary_embedding_passes_exactly_where_the_classes_tables_are_numbers(answer: dict[str, Any]) -> None:
    wrong = []
    for (name, config), sound in zip(rope_numbers.cells(), answer["rotations"], strict=True):
        tables = SGLANG.other_class(config) or SGLANG
        stops = bool(tables.refusals(config))
        fault = None if stops else tables.rotation_fault(tables.with_defaults(config))
        if sound != (not stops and fault is None):
            wrong.append(f"{name}: {'sound' if sound else 'not sound'}, but said: {fault.why if fault else stops}")
    assert not wrong, f"{len(wrong)} of {len(answer['rotations'])} cells:\n" + "\n".join(wrong)


def test_a_ramp_runs_backwards_exactly_where_it_does_in_the_classes(answer: dict[str, Any]) -> None:
    said = [
        [rotation.runs_backwards({"rope_type": form, "beta_fast": fast, "beta_slow": slow}) for form in rotation.YARN]
        for fast, slow in RAMPS
    ]
    assert said == answer["ramps"]
    assert said.count([False, False]) == 4


def test_what_the_engine_takes_is_read_as_it_reads_it(answer: dict[str, Any]) -> None:
    wrong = []
    for name, config, verdict in answer["judged"]:
        # a class that imposes sizes is failed as such: what it makes of its own keys is not read
        imposes = (accepts.config_class(config) or {"imposes": {}})["imposes"]
        if verdict["error"] is None and not stops(config) and verdict["heads"] and not imposes:
            full = engine.with_defaults(config)
            ours = {
                "heads": [full[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")],
                "theta": engine.rope_settings(config)["rope_theta"],
                "eps": full["rms_norm_eps"],
                "tied": full["tie_word_embeddings"],
                "positions": accepts.positions(full),
                "rotary": int(engine.rope_settings(config)["partial_rotary_factor"] * full["head_dim"]),
                "captured": engine.captured_inputs(config, 30, None) if engine.uses_aux_hidden_state(config) else None,
            }
            theirs = {
                "heads": verdict["heads"],
                "theta": verdict["theta"],
                "eps": verdict["values"]["rms_norm_eps"],
                "tied": verdict["values"]["tie_word_embeddings"],
                "positions": verdict["context"],
                "rotary": verdict["rotary"][1],
                "captured": verdict["captured"],
            }
            wrong += [f"{name}: {key} {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:40])


#: what decides, beside the weights, what the draft computes
COMPUTES = (
    "captured",
    "shapes",
    "theta",
    "rotary",
    "heads",
    "norm_output",
    "target_head",
    "dropped",
    "empty",
    "context",
)


def computes(verdict: dict[str, Any]) -> list[Any]:
    values = verdict["values"]
    return [*(verdict[key] for key in COMPUTES), values["rms_norm_eps"], values["tie_word_embeddings"]]


def test_check_fails_what_the_engine_refuses_and_never_what_it_computes_as_trained(
    answer: dict[str, Any], healthy: Folders
) -> None:
    trained = computes(answer["whole"]["healthy"][1])
    wrong, seen = [], {"refused": 0, "as trained": 0, "otherwise": 0}
    for name, (path, verdict) in answer["whole"].items():
        pair = (TARGET, None) if name == "demo" else (healthy.target, healthy.draft)
        for reference in (pair[1], None):
            result = check(path, target=pair[0], reference=reference)
            if verdict["error"] is not None or verdict["class"] != engine.ARCHITECTURE:
                outcome, fine = "refused", result.exit_status == 1
            elif name == "demo" or computes(verdict) == trained:
                outcome, fine = "as trained", result.exit_status == 0
            else:
                outcome, fine = "otherwise", any(f.status is not Status.PASS for f in result.findings)
                # with the training known, what is computed otherwise is no mere skip
                fine = fine if reference is None else bool(troubles(result))
            seen[outcome] += 1
            if not fine:
                said = {f.name: f.evidence for f in result.findings if f.status in (Status.FAIL, Status.WARN)}
                wrong.append(f"{name} ({outcome}, reference {reference is not None}): {said}, {verdict['error']}")
    assert min(seen.values()) > 10, seen
    assert not wrong, f"{len(wrong)} of {sum(seen.values())}:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("name", TARGETS)
def test_a_targets_config_stops_the_engine_where_the_check_says_so(answer: dict[str, Any], name: str) -> None:
    _, key = TARGETS[name]
    stopped = answer["targets"][list(TARGETS).index(name)]
    assert (stopped is not None) == bool(key), stopped


def test_table_of_config_classes_is_the_installed_packages_own(tmp_path: Path, warm: Warm) -> None:
    with warm():
        assert config_classes.TABLE.read_text() == config_classes.to_text(config_classes.find(tmp_path))


def test_table_of_target_classes_is_the_registrys_own(answer: dict[str, Any]) -> None:
    methods = ("set_eagle3_layers_to_capture", "get_embed_and_head")
    capture, embed = ({name for name, has in answer["registry"].items() if has[method]} for method in methods)
    there = set(answer["registry"])
    # modules that want a GPU's kernels are not imported here: their classes are in the table and not in `there`
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "KimiK25ForConditionalGeneration"} <= there
    assert there <= SERVES | NO_CAPTURE | NO_EMBEDDING
    assert SERVES & there == capture & embed
    assert NO_EMBEDDING & there == capture - embed
    assert NO_CAPTURE & there == there - capture
