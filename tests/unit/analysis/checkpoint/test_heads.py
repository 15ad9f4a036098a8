"""Heads as they are published: who made each, and what is said of it for either engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.checkpoint.recipe import Recipe, read_recipe
from eagle_trace_analysis.engines import ENGINES
from eagle_trace_analysis.trainers import TRAINERS
from tests.support import checkpoints as make
from tests.support.check_cases import named, troubles
from tests.support.published_heads import (
    HEADS,
    LAYER,
    STOPS,
    TAKEN,
    Config,
    Head,
    eagle,
    flat,
    judged,
    table,
    target,
    tensors,
    with_values,
)

SUPPORT = Path(__file__).parents[4] / "docs" / "support.md"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", range(len(HEADS)), ids=[head.name for head in HEADS])
def test_a_published_head_is_judged_by_its_trainers_rules(number: int, engine: str) -> None:
    head = HEADS[number]
    told, found, words = judged(number, engine)
    assert told.startswith(f"written by {TRAINERS[head.trainer].TITLE}") if head.trainer else not told
    assert found == dict(getattr(head, engine)), words
    if engine == "sglang":
        assert head.says in words


def test_the_documented_table_of_heads_is_what_check_says() -> None:
    text = SUPPORT.read_text(encoding="utf-8")
    missing = [row for row in table() if row not in text]
    assert not missing, "python -m tests.support.published_heads prints the table:\n" + "\n".join(missing)


@pytest.mark.parametrize("values", STOPS.values(), ids=STOPS)
def test_a_published_value_at_which_the_config_loader_stops_is_named(values: Config, tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, with_values(values), tensors())
    finding = named(check(draft), "config")
    assert finding.status is Status.FAIL
    assert next(iter(values)).replace("torch_dtype", "dtype") in finding.evidence


@pytest.mark.parametrize("values", TAKEN.values(), ids=TAKEN)
def test_a_null_that_the_config_loader_takes_is_no_alarm(values: Config, tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, with_values(values), tensors())
    assert set(troubles(check(draft))) <= ({"layer-ids"} if "eagle_config" in values else set())


@pytest.mark.parametrize(
    ("architecture", "kind", "captures"),
    [
        ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", False),
        ("GraniteMoeForCausalLM", "granitemoe", False),
        ("MistralForCausalLM", "mistral", True),
    ],
)
def test_a_target_that_gives_no_layers_away_is_named(
    architecture: str, kind: str, captures: bool, tmp_path: Path
) -> None:
    draft, whole = Head("", "", "", flat(**eagle([1, 15, 28])), target=target(architecture, kind)).write(tmp_path)
    assert ("target-class" in troubles(check(draft, target=whole))) != captures


@pytest.mark.parametrize(
    ("outer", "inner", "captures"),
    [
        ("Mistral3ForConditionalGeneration", "mistral", False),
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", True),
    ],
)
def test_the_class_of_a_target_with_images_is_the_outer_one(
    outer: str, inner: str, captures: bool, tmp_path: Path
) -> None:
    text = {key: one for key, one in target("", inner).items() if key != "architectures"}
    config = {"architectures": [outer], "model_type": "qwen3_vl_moe" if captures else "mistral3", "text_config": text}
    draft, whole = Head("", "", "", flat(**eagle([1, 15, 28])), target=config).write(tmp_path)
    assert ("target-class" in troubles(check(draft, target=whole))) != captures


# ---- SpecForge: what its flag means, and what it was trained with


NORMED, BARE = {"norm_output": True}, {"norm_output": False}
OLD, LATER = "specforge==0.2.0", "specforge==0.3.0"
#: deployed, trained, release: what is said of norm-output
FLAGS: list[tuple[Config, Config | None, str | None, Status, str]] = [
    ({}, None, None, Status.PASS, ""),
    (NORMED, None, None, Status.WARN, "carry-norm"),
    (NORMED, None, OLD, Status.FAIL, "carry-norm"),
    (NORMED, None, LATER, Status.SKIP, "carry-norm"),
    (BARE, None, OLD, Status.WARN, "head-norm"),
    (NORMED, NORMED, OLD, Status.FAIL, "carry-norm"),
    (NORMED, NORMED, None, Status.WARN, "carry-norm"),
    (NORMED, NORMED, LATER, Status.PASS, "carry-norm"),
    (BARE, NORMED, OLD, Status.PASS, "carry-norm"),
    (BARE, NORMED, LATER, Status.FAIL, "carry-norm"),
    (BARE, BARE, OLD, Status.FAIL, "head-norm"),
    ({}, {}, OLD, Status.PASS, "carry-norm"),
]


@pytest.mark.parametrize(("deployed", "trained", "trainer", "status", "cause"), FLAGS)
def test_norm_output_is_read_as_the_release_that_trained_it_meant_it(
    deployed: Config, trained: Config | None, trainer: str | None, status: Status, cause: str, tmp_path: Path
) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(**eagle([1, 15, 28])) | deployed, tensors())
    reference = None
    if trained is not None:
        reference = tmp_path / "draft_config.json"
        reference.write_text(json.dumps(flat(**eagle([1, 15, 28])) | trained))
    finding = named(check(draft, reference=reference, trainer=trainer), "norm-output")
    assert finding.status is status, finding
    if cause:
        assert finding.cause == cause


def test_ids_of_a_recipe_that_were_not_exported_are_held_against_the_deployed(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(), tensors())
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model:\n  aux_hidden_state_layer_ids: [1, 9, 20]\ndata: {max_length: 2048}\n")
    assert named(check(draft), "layer-ids").status is Status.WARN
    finding = named(check(draft, recipe=read_recipe([str(recipe)])), "layer-ids")
    assert "[2, 10, 21]" in finding.evidence
    assert "[1, 9, 20]" in finding.fix


@pytest.mark.parametrize(
    ("recipe", "status"),
    [
        (Recipe("", max_length=4096), Status.PASS),
        (Recipe("", max_length=4110), Status.PASS),
        (Recipe("", max_length=4111), Status.WARN),
        (Recipe("", max_length=4116, ttt_length=1), Status.PASS),
        (Recipe("", max_length=8192), Status.WARN),
        (Recipe("", max_length=8192, torch_dtype="float32"), Status.PASS),
        (Recipe("", max_length=None), Status.SKIP),
    ],
)
def test_a_recipe_that_outgrows_the_rotary_tables_warns(recipe: Recipe, status: Status, tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, flat(**eagle([1, 15, 28])), tensors())
    finding = named(check(draft, recipe=recipe), "rope-tables")
    assert finding.status is status, finding.evidence
    assert (finding.cause, "4,116" in finding.evidence or status is Status.SKIP) == ("rope-tables", True)


def test_without_a_recipe_nothing_is_said_of_rotary_tables(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, flat(), tensors())
    assert "rope-tables" not in {one.name for one in check(draft).findings}


def test_a_recipe_names_the_config_that_was_trained_with(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(rope_theta=5e5), tensors())
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "draft.json").write_text(json.dumps(flat(rope_theta=1e6)))
    (tmp_path / "run.yaml").write_text("model: {draft_model_config: configs/draft.json}\n")
    finding = named(check(draft, recipe=read_recipe([str(tmp_path / "run.yaml")])), "rope")
    assert finding.status is Status.FAIL
    assert "trained 1000000" in finding.evidence


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothing.yaml"], "cannot read the recipe"),
        (["data.max_length=[1"], "is not a setting such as"),
        (["data.max_length=-1"], "has to be a number of 1 or more"),
        (["model.aux_hidden_state_layer_ids=3"], "has to be a list of layer ids"),
        (["{folder}/list.yaml"], "holds no settings by name"),
        (["{folder}/broken.yaml"], "is neither YAML nor JSON"),
        (["{folder}/bytes.yaml"], "is not text"),
    ],
)
def test_a_recipe_that_is_none_is_one_sentence(given: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\nb: }")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises((CheckpointError, UsageError), match=words) as caught:
        read_recipe([one.format(folder=tmp_path) for one in given])
    assert "\n" not in str(caught.value)


def test_settings_on_the_command_line_stand_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {max_length: 1024}\ntraining: {ttt_length: 3}\n")
    recipe = read_recipe([str(tmp_path / "run.yaml"), "data.max_length=4096", "--torch-dtype=float16"])
    assert recipe is not None
    assert (recipe.max_length, recipe.ttt_length, recipe.torch_dtype) == (4096, 3, "float16")


# ---- a training's config alone, and a checkpoint in training


def test_a_config_alone_needs_to_be_somebodys(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(), tensors(LAYER))
    reference = tmp_path / "draft_config.json"
    reference.write_text(json.dumps(flat(rms_norm_eps=1e-6)))
    with pytest.raises(UsageError, match="nothing says which trainer it is for: give --trainer"):
        check(draft, reference=reference)
    assert named(check(draft, reference=reference, trainer="specforge"), "norm-eps").status is Status.FAIL


def test_a_config_given_as_a_draft_is_told_its_place(tmp_path: Path) -> None:
    config = tmp_path / "draft_config.json"
    config.write_text(json.dumps(flat()))
    result = CliRunner().invoke(app, ["check", str(config)])
    assert result.exit_code == 2
    assert "is a file: give a checkpoint's folder; the config of a training is a --reference" in result.output


def test_a_folder_with_a_config_alone_is_a_reference_too(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(), tensors())
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.json").write_text(json.dumps(flat(rms_norm_eps=1e-6)))
    assert named(check(draft, reference=tmp_path / "trained"), "norm-eps").status is Status.FAIL


def test_a_trainer_that_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, flat(), tensors())
    with pytest.raises(UsageError, match="no trainer is called 'nonsense': those known here are speculators,"):
        check(draft, trainer="nonsense==1")


def test_a_draft_in_a_trainers_own_format_is_no_other_trainers(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, make.speculators_config(), make.draft_tensors())
    with pytest.raises(UsageError, match="is in speculators's format, and --trainer names SpecForge"):
        check(draft, trainer="specforge")


def test_a_recipe_given_as_a_reference_is_told_its_place(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "draft", flat(), tensors())
    (tmp_path / "run.yaml").write_text("data: {max_length: 1}")
    with pytest.raises(CheckpointError, match="a recipe goes to --recipe"):
        check(draft, reference=tmp_path / "run.yaml")


def in_training(folder: Path, config: Config, place: str = "draft_config.json") -> Path:
    """What SpecForge leaves in training: names as they are, the embedding left out, other things beside."""
    torch = pytest.importorskip("torch")
    from tests.support.torch_files import as_torch

    state = {name: as_torch(one) for name, one in tensors().items()}
    (folder / "run-step3").mkdir(parents=True)
    whole = {"strategy": "eagle3", "draft_state_dict": state, "global_step": 3, "optimizer": {"lr": 0.1}}
    torch.save(whole, folder / "run-step3" / "training_state.pt")
    (folder / place).write_text(json.dumps(config))
    return folder / "run-step3"


def test_a_checkpoint_in_training_is_judged_as_its_export_would_be(tmp_path: Path) -> None:
    step = in_training(tmp_path / "run", flat(**eagle([1, 15, 28])))
    exported = make.write_checkpoint(tmp_path / "exported", flat(**eagle([1, 15, 28])), tensors())
    result = check(step)
    assert result.trainer == "written by SpecForge: it is a checkpoint in training (training_state.pt)"
    assert {one.name: one.status for one in result.findings if one.status is not Status.SKIP}.items() >= {
        one.name: one.status for one in check(exported).findings if one.status is not Status.SKIP
    }.items()


def test_a_checkpoint_in_training_is_a_reference_by_values_and_by_config(tmp_path: Path) -> None:
    step = in_training(tmp_path / "run", flat(rms_norm_eps=1e-6))
    changed = tensors() | {"norm.weight": tensors()["midlayer.hidden_norm.weight"]}
    draft = make.write_checkpoint(tmp_path / "draft", flat(), changed)
    result = check(draft, reference=step)
    assert [change.name for change in result.changes] == ["norm.weight"]
    assert named(result, "norm-eps").status is Status.FAIL


def test_a_checkpoint_in_training_without_its_config_comes_with_the_way_out(tmp_path: Path) -> None:
    step = in_training(tmp_path / "run", flat(), "other.json")
    with pytest.raises(
        CheckpointError, match=r"put the draft_config\.json beside it, or give the folder that"
    ) as caught:
        check(step)
    assert "\n" not in str(caught.value)


# ---- an index alone


def test_an_index_alone_is_enough_for_names_and_settings(tmp_path: Path) -> None:
    names = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors") | {
        "stray.weight": "model-00002-of-00002.safetensors"
    }
    (tmp_path / "config.json").write_text(json.dumps(flat(**eagle([1, 15, 28]))))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    result = check(tmp_path)
    assert "stray.weight" in named(result, "weight-names").evidence
    assert named(result, "weights-present").status is Status.PASS
    assert named(result, "everything else").status is Status.SKIP
    assert not {"finite", "head-shape", "d2t"} & {one.name for one in result.findings}


def test_a_head_whose_rows_differ_is_not_called_pruned_by_offsets(tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path, flat(), tensors())
    assert named(check(draft, engine=ENGINES["vllm"]), "head-rows").status is Status.SKIP
