"""A speculators checkpoint as SGLang loads it: conventions translated, and what cannot be computed refused."""

import json
import shutil
from pathlib import Path

import pytest

from eagle_trace.errors import CheckpointError, OutputExistsError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import Status
from tests.support.check_cases import named
from tests.support.latent import write_draft
from tests.support.pairs import DRAFT, TARGET


def exported(draft: Path, out: Path, **options: bool) -> dict[str, object]:
    export(draft, out, target=TARGET, **options)
    return dict(json.loads((out / "config.json").read_text()))


def changed(tmp_path: Path, **changes: object) -> Path:
    draft = tmp_path / "changed"
    draft.mkdir()
    config = json.loads((DRAFT / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | changes))
    (draft / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes())
    return draft


def test_layer_ids_are_lowered_by_one_and_ties_are_cut(tmp_path: Path) -> None:
    flat = exported(DRAFT, tmp_path / "out")
    trained = json.loads((DRAFT / "config.json").read_text())
    assert flat["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in trained["eagle_aux_hidden_state_layer_ids"]],
        "norm_before_fc": False,
    }
    assert flat["tie_word_embeddings"] is False
    assert flat["architectures"] == ["LlamaForCausalLMEagle3"]
    assert flat["draft_vocab_size"] == 80
    assert flat["dtype"] == "bfloat16"


def test_weights_are_copied_byte_by_byte(tmp_path: Path) -> None:
    exported(DRAFT, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (DRAFT / "model.safetensors").read_bytes()


def test_ids_a_config_leaves_out_are_the_default_of_the_target(tmp_path: Path) -> None:
    draft = changed(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    flat = exported(draft, tmp_path / "out")
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # type: ignore[index]
    with pytest.raises(CheckpointError, match="give --target"):
        export(draft, tmp_path / "other")


def test_trained_settings_that_sglang_has_are_handed_over(tmp_path: Path) -> None:
    flat = exported(changed(tmp_path, norm_output=True, fc_norm=True, norm_before_fc=True), tmp_path / "out")
    assert flat["norm_output"] is True
    assert flat["fc_norm"] is True
    assert flat["eagle_config"]["norm_before_fc"] is True  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"embed_requires_grad": True}, "own embedding"),
    ],
)
def test_what_sglang_cannot_compute_is_refused_unless_forced(
    tmp_path: Path, changes: dict[str, bool], reason: str
) -> None:
    draft = changed(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        export(draft, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (warning,) = export(draft, tmp_path / "out", force=True)
    assert reason in warning


def test_force_replaces_an_exported_draft_and_nothing_else(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    export(DRAFT, out, target=TARGET)
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    (out / "left-over.safetensors").write_bytes(b"of an older draft")
    with pytest.raises(OutputExistsError, match="or --force to replace it"):
        export(DRAFT, out, target=TARGET)
    export(DRAFT, out, target=TARGET, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole

    target = tmp_path / "target"
    shutil.copytree(DRAFT, other)
    shutil.copytree(TARGET, target)
    link = tmp_path / "link"
    link.symlink_to(out)
    (tmp_path / "file").write_text("mine")
    shutil.copytree(out, tmp_path / "noted")
    (tmp_path / "noted" / "notes.md").write_text("mine")
    for taken, why in (
        (other, "is what is exported"),
        (link, "is a link to"),
        (target, "is what is exported"),
        (tmp_path / "file", "more than an exported draft"),
        (tmp_path / "noted", "more than an exported draft"),
    ):
        before = taken.read_bytes() if taken.is_file() else sorted(file.name for file in taken.iterdir())
        with pytest.raises(OutputExistsError, match=why):
            export(other, taken, target=target, force=True)
        assert before == (taken.read_bytes() if taken.is_file() else sorted(file.name for file in taken.iterdir()))


def test_a_draft_that_cannot_be_exported_takes_nothing_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(DRAFT, out, target=TARGET)
    with pytest.raises(CheckpointError):
        export(changed(tmp_path, eagle_aux_hidden_state_layer_ids=[4, 2, 5]), out, target=TARGET, force=True)
    assert (out / "config.json").is_file()


def test_a_target_that_reads_layer_ids_in_its_own_way_gets_the_list_it_needs(tmp_path: Path) -> None:
    target = tmp_path / "kimi"
    target.mkdir()
    config = json.loads((TARGET / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["DeepseekV3ForCausalLM"]}))
    export(changed(tmp_path, eagle_aux_hidden_state_layer_ids=[3, 4, 5]), tmp_path / "out", target=target)
    flat = json.loads((tmp_path / "out/config.json").read_text())
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 4, 5]


def test_layers_in_another_order_than_they_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be said to SGLang"):
        export(changed(tmp_path, eagle_aux_hidden_state_layer_ids=[4, 2, 5]), tmp_path / "out", target=TARGET)


def test_bad_folders_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not in speculators format"):
        export(TARGET, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"with latent attention, .* deploy the folder as it is"):
        export(write_draft(tmp_path / "latent"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="there is no folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match="cannot be said to SGLang"):
        export(changed(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 4, 5]), tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    with pytest.raises(OutputExistsError):
        export(DRAFT, tmp_path / "taken")


def test_a_share_of_each_head_that_training_did_not_rotate_is_left_out(tmp_path: Path) -> None:
    layer = json.loads((DRAFT / "config.json").read_text())["transformer_layer_config"]
    draft = changed(tmp_path, transformer_layer_config=layer | {"partial_rotary_factor": 0.5})
    out = tmp_path / "out"
    assert "partial_rotary_factor" not in exported(draft, out)
    assert named(check(draft, target=TARGET), "rope").status is Status.PASS
    served = json.loads((out / "config.json").read_text()) | {"partial_rotary_factor": 0.5}
    (out / "config.json").write_text(json.dumps(served))
    finding = named(check(out, target=TARGET, reference=draft), "rope")
    assert finding.status is Status.FAIL
    assert finding.fix == "set partial_rotary_factor, at the top of the config, to 1.0"
