"""The static check: one finding for each fault planted in a config."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_trace.errors import EagleTraceError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines import SGLANG
from eagle_trace_analysis.trainers import speculators
from tests.support import checkpoints as make
from tests.support.check_cases import (
    Folders,
    Harm,
    flat_config,
    named,
    only,
    put,
    setting,
    troubles,
    write_healthy,
)
from tests.support.config_cases import FLAT_FAULTS


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


OWN = np.arange(make.DRAFT_VOCABULARY)


@pytest.mark.parametrize(
    ("harm", "name", "cause", "words", "fix"), [f[1:] for f in FLAT_FAULTS], ids=[f[0] for f in FLAT_FAULTS]
)
def test_planted_fault_of_a_flat_config_is_exactly_that_finding(
    healthy: Folders, tmp_path: Path, harm: Harm, name: str, cause: str, words: str, fix: str
) -> None:
    config, tensors = flat_config(healthy), make.draft_tensors()
    harm(config, tensors)
    draft = make.write_checkpoint(tmp_path, config, tensors)
    finding = only(check(draft, target=healthy.target, reference=healthy.draft), name)
    assert finding.cause == cause
    assert words in finding.evidence
    assert fix in finding.fix


def test_absent_layer_ids_are_right_only_if_training_took_the_default(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy)
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    assert "guesses" in only(check(draft), "layer-ids", Status.WARN).evidence
    assert troubles(check(draft, target=healthy.target, reference=healthy.draft)) == {}  # [2, 15, 27] of 30 layers
    other = make.speculators_config() | {"eagle_aux_hidden_state_layer_ids": [4, 10, 20]}
    trained = make.write_checkpoint(tmp_path / "trained", other, make.draft_tensors())
    finding = only(check(draft, target=healthy.target, reference=trained), "layer-ids")
    assert finding.cause == "layer-ids-default"
    assert "[3, 9, 19]" in finding.fix


def test_ids_copied_unshifted_look_suspicious_even_without_a_reference(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 15, 27]
    draft = make.write_checkpoint(tmp_path, config, make.draft_tensors())
    finding = only(check(draft, target=healthy.target), "layer-ids", Status.WARN)
    assert finding.cause == "layer-ids-shifted"
    assert "[1, 14, 26]" in finding.fix


def test_deepseek_targets_shift_only_lists_that_start_with_one(healthy: Folders, tmp_path: Path) -> None:
    deepseek = make.decoder_config(make.LAYERS) | {"architectures": ["DeepseekV3ForCausalLM"]}
    target = make.write_checkpoint(tmp_path / "target", deepseek, make.target_tensors())
    assert troubles(check(healthy.flat, target=target, reference=healthy.draft)) == {}
    config = make.speculators_config() | {"eagle_aux_hidden_state_layer_ids": [4, 15, 27]}
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    # `export --target` writes the list for that class, so nothing is wrong with the draft
    result = check(draft, target=target)
    assert troubles(result) == {}
    assert "export --target` writes [4, 15, 27]" in named(result, "layer-ids").evidence


SPECULATORS_FAULTS: list[tuple[str, Harm, str, str]] = [
    ("norm before residual", setting(norm_before_residual=True), "residual-norm", "residual-norm"),
    ("own embedding", setting(embed_requires_grad=True), "embedding", "embedding-replaced"),
    (
        "embedding output as feature",
        setting(eagle_aux_hidden_state_layer_ids=[0, 15, 27]),
        "layer-ids",
        "layer-ids-shifted",
    ),
    ("fc norm without weights", setting(fc_norm=True), "fc-norm", "fc-norm-ignored"),
    (
        "fc norm weights without flag",
        put("fc_norm.0.weight", lambda _: np.ones(make.HIDDEN, np.float32)),
        "fc-norm",
        "fc-norm-ignored",
    ),
    (
        "gelu",
        lambda c, _: c["transformer_layer_config"].update(hidden_act="gelu"),
        "decoder-layer",
        "weights-dropped",
    ),
    (
        "bias",
        lambda c, _: c["transformer_layer_config"].update(mlp_bias=True),
        "decoder-layer",
        "weights-dropped",
    ),
    (
        "qwen3",
        lambda c, _: c["transformer_layer_config"].update(model_type="qwen3"),
        "decoder-layer",
        "weights-dropped",
    ),
]


@pytest.mark.parametrize(
    ("harm", "name", "cause"), [f[1:] for f in SPECULATORS_FAULTS], ids=[f[0] for f in SPECULATORS_FAULTS]
)
def test_planted_fault_of_a_speculators_config_is_exactly_that_finding(
    healthy: Folders, tmp_path: Path, harm: Harm, name: str, cause: str
) -> None:
    config, tensors = make.speculators_config(), make.draft_tensors()
    harm(config, tensors)
    if name == "fc-norm" and "fc_norm.0.weight" in tensors:
        # in training this is an unknown key; it means something only where the flags are not known
        config = flat_config(healthy)
    finding = only(check(make.write_checkpoint(tmp_path, config, tensors), target=healthy.target), name)
    assert finding.cause == cause


def test_norms_before_fc_that_are_trained_stored_and_served_pass(tmp_path: Path) -> None:
    for flag, names, width in (
        ("fc_norm", [f"fc_norm.{k}.weight" for k in range(3)], make.HIDDEN),
        ("norm_before_fc", ["input_norm.weight"], 3 * make.HIDDEN),
    ):
        tensors = make.draft_tensors() | {name: np.linspace(0.5, 1.5, width, dtype=np.float32) for name in names}
        config = make.speculators_config() | {flag: True}
        draft = make.write_checkpoint(tmp_path / flag, config, tensors)
        export(draft, tmp_path / f"{flag}-flat")
        assert troubles(check(draft)) == {}
        assert troubles(check(tmp_path / f"{flag}-flat", reference=draft)) == {}


def test_check_fails_wherever_export_refuses(tmp_path: Path) -> None:
    for number, (_, harm, _, _) in enumerate(SPECULATORS_FAULTS):
        config, tensors = make.speculators_config(), make.draft_tensors()
        harm(config, tensors)
        if SGLANG.gaps(speculators.training_of(config)):
            assert check(make.write_checkpoint(tmp_path / str(number), config, tensors)).exit_status == 1


def test_embedding_that_is_not_the_targets_fails(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][::-1]
    draft = make.write_checkpoint(tmp_path, make.speculators_config(), tensors)
    assert "of 256 rows" in only(check(draft, target=healthy.target), "embedding").evidence


def test_head_rows_tell_ids_from_offsets_without_t2d(healthy: Folders, tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    tensors["d2t"] = tensors["d2t"] + OWN
    draft = make.write_checkpoint(tmp_path, make.speculators_config(), tensors)
    result = check(draft, target=healthy.target)
    assert set(troubles(result)) == {"d2t", "head-rows"}
    assert named(result, "head-rows").cause == "d2t-absolute"


@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_a_head_of_the_targets_first_rows_under_a_d2t_that_maps_elsewhere_is_named(
    moved: float, healthy: Folders, tmp_path: Path
) -> None:
    tensors = make.draft_tensors()
    theirs = make.target_tensors()["lm_head.weight"][: make.DRAFT_VOCABULARY].astype(np.float32)
    noise = np.random.default_rng(2).standard_normal(theirs.shape).astype(np.float32)
    tensors["lm_head.weight"] = (theirs + moved * theirs.std() * noise).astype(tensors["lm_head.weight"].dtype)
    draft = make.write_checkpoint(tmp_path, make.speculators_config(), tensors)
    result = check(draft, target=healthy.target)
    assert set(troubles(result)) == {"head-rows"}
    assert "the head's rows are the target's first" in named(result, "head-rows").evidence


def test_a_head_of_one_row_is_named(tmp_path: Path) -> None:
    tensors = make.draft_tensors()
    tensors["lm_head.weight"] = np.broadcast_to(tensors["lm_head.weight"][5], tensors["lm_head.weight"].shape).copy()
    result = check(make.write_checkpoint(tmp_path, make.speculators_config(), tensors))
    assert "one row throughout: lm_head.weight" in named(result, "zeros").evidence
    assert named(result, "zeros").status is Status.FAIL


def test_a_file_the_index_does_not_name_is_a_warning(healthy: Folders, tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, flat_config(healthy), make.draft_tensors(), shards=2)
    make.write_safetensors(tmp_path / "extra.safetensors", {"fc.weight": np.ones((2, 2), np.float32)})
    assert "extra.safetensors" in only(check(draft), "weight-names", Status.WARN).evidence


def test_old_and_new_keys_of_the_same_rope_agree(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy)
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rope_scaling": None}
    draft = make.write_checkpoint(tmp_path, config, make.draft_tensors())
    assert troubles(check(draft, reference=healthy.draft)) == {}


def test_target_of_another_family_is_not_compared_with_defaults_it_may_not_have(
    healthy: Folders, tmp_path: Path
) -> None:
    text = {"model_type": "kimi", "num_hidden_layers": make.LAYERS, "hidden_size": make.HIDDEN}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    target = make.write_checkpoint(tmp_path, config, make.target_tensors())
    assert troubles(check(healthy.flat, target=target, reference=healthy.draft)) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"transformer_layer_config": None},
        {"transformer_layer_config": make.decoder_config(1) | {"layer_types": 1}},
        {"transformer_layer_config": make.decoder_config(1) | {"hidden_size": None}},
        {"eagle_aux_hidden_state_layer_ids": [[1]]},
        {"eagle_aux_hidden_state_layer_ids": {"a": 1}},
        {"eagle_aux_hidden_state_layer_ids": "1, 2"},
        {"draft_vocab_size": "96"},
        {"speculators_model_type": None},
        {"quantization_config": 3},
        {"architectures": [[1]]},
    ],
    ids=str,
)
def test_a_config_that_is_no_config_ends_check_and_export_in_a_sentence(
    healthy: Folders, tmp_path: Path, change: dict[str, object]
) -> None:
    spoken = []
    for number, config in enumerate((make.speculators_config() | change, flat_config(healthy) | change)):
        draft = make.write_checkpoint(tmp_path / f"draft{number}", config, make.draft_tensors())
        for attempt in (lambda: check(draft, target=healthy.target), lambda: export(draft, tmp_path / "out")):  # noqa: B023
            try:
                attempt()
            except EagleTraceError as error:
                spoken.append(str(error))
    assert spoken
    assert all(sentence and "\n" not in sentence for sentence in spoken)


def test_sections_that_training_had_not_are_warned_of_and_not_failed(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy)
    config["rope_parameters"] = config["rope_parameters"] | {"rope_type": "mrope", "mrope_section": [2, 3, 3]}
    draft = make.write_checkpoint(tmp_path, config, make.draft_tensors())
    finding = only(check(draft, target=healthy.target, reference=healthy.draft), "rope", Status.WARN)
    assert "the same for text" in finding.evidence


def test_an_eps_below_nothing_fails(healthy: Folders, tmp_path: Path) -> None:
    config = flat_config(healthy) | {"rms_norm_eps": -1.0}
    make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    found = named(check(tmp_path / "draft"), "norm-eps")
    assert found.status is Status.FAIL
    assert "not a number" in found.evidence
