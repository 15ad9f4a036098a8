"""A speculators checkpoint as SGLang loads it: conventions translated, and what cannot be computed refused."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError, OutputExistsError, RecordingError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.exported import MARK
from eagle_trace_analysis.checkpoint.finding import Status
from tests.support.check_cases import named
from tests.support.checkpoints import write_checkpoint
from tests.support.latent import write_draft
from tests.support.pairs import DRAFT, TARGET
from tests.support.published_heads import eagle, flat, tensors


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


def held(place: Path) -> Any:
    """What lies at a place, links as links, byte by byte."""
    if place.is_symlink():
        return place.readlink()
    if place.is_dir():
        return {one.name: held(one) for one in place.iterdir()}
    return place.read_bytes() if place.exists() else None


def test_force_replaces_an_exported_draft(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(changed(tmp_path, norm_output=True), out, target=TARGET)
    out.chmod(0o750)
    with pytest.raises(OutputExistsError, match="or --force to replace it"):
        export(DRAFT, out, target=TARGET)
    export(DRAFT, out, target=TARGET, force=True)
    export(DRAFT, tmp_path / "fresh", target=TARGET)
    assert held(out) == held(tmp_path / "fresh")
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    # nothing hidden stays beside it
    assert {one.name for one in tmp_path.iterdir()} == {"changed", "out", "fresh"}


def test_an_empty_folder_stays_the_one_it_is(tmp_path: Path) -> None:
    before = tmp_path.stat().st_ino
    export(DRAFT, tmp_path, target=TARGET)
    assert tmp_path.stat().st_ino == before
    assert sorted(one.name for one in tmp_path.iterdir()) == [MARK, "config.json", "model.safetensors"]


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda out: (out / name).write_bytes(change((out / name).read_bytes()))


def linked(out: Path) -> None:
    (out / "model.safetensors").rename(out.parent / "kept")
    (out / "model.safetensors").symlink_to(out.parent / "kept")


#: what is done to an exported draft that makes it somebody's work
CHANGES: dict[str, Callable[[Path], object]] = {
    "trained on": edited("model.safetensors", lambda held: held[:-1] + bytes([held[-1] ^ 1])),
    "another config": edited("config.json", lambda held: held.replace(b"false", b"true", 1)),
    "a note": lambda out: (out / "notes.md").write_text("mine"),
    "a folder": lambda out: (out / "runs").mkdir(),
    "more weights": lambda out: shutil.copyfile(out / "model.safetensors", out / "more.safetensors"),
    "weights gone": lambda out: (out / "model.safetensors").unlink(),
    "weights elsewhere": linked,
    "no mark": lambda out: (out / MARK).unlink(),
    "a mark of something": edited(MARK, lambda _: b'{"files": 7}'),
    "a mark that is not JSON": edited(MARK, lambda held: held[:-5]),
    "a mark of nothing": edited(MARK, lambda _: b'{"files": {}}'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_force_replaces_no_export_that_was_changed_since(change: Callable[[Path], object], tmp_path: Path) -> None:
    export(DRAFT, tmp_path / "out", target=TARGET)
    change(tmp_path / "out")
    before = held(tmp_path)
    with pytest.raises(OutputExistsError, match="or it was changed since"):
        export(DRAFT, tmp_path / "out", target=TARGET, force=True)
    assert held(tmp_path) == before


def test_force_replaces_nothing_that_no_export_wrote(tmp_path: Path) -> None:
    """Trained drafts, targets and heads of others hold a config and weights as well."""
    source, target, out = tmp_path / "source", tmp_path / "target", tmp_path / "out"
    shutil.copytree(DRAFT, source)
    shutil.copytree(DRAFT, tmp_path / "another trained draft")
    shutil.copytree(TARGET, target)
    shutil.copytree(TARGET, tmp_path / "another target")
    write_checkpoint(tmp_path / "a head in the server's format", flat(**eagle([1, 14, 26])), tensors())
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "unrelated/thesis.tex").write_text("mine")
    export(DRAFT, out, target=TARGET)
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "file").write_text("mine")
    shutil.copytree(out, tmp_path / "read from")
    (target / "extra.bin").symlink_to(tmp_path / "read from/model.safetensors")
    before = held(tmp_path)
    for taken, why in (
        ("another trained draft", "eagle-trace export wrote"),
        ("another target", "eagle-trace export wrote"),
        ("a head in the server's format", "eagle-trace export wrote"),
        ("unrelated", "eagle-trace export wrote"),
        ("file", "eagle-trace export wrote"),
        (".", "eagle-trace export wrote"),  # the parent of what is exported
        ("source", "is what is exported"),
        ("target", "is what is exported"),
        ("read from", "is what is exported"),
        ("link", "is a link to"),
        ("nowhere", "is a link to"),
    ):
        with pytest.raises(OutputExistsError, match=why):
            export(source, tmp_path / taken, target=target, force=True)
        assert held(tmp_path) == before, taken


@pytest.mark.parametrize("place", ["replaced", "empty", "missing"])
@pytest.mark.parametrize("fails", ["copy", "sync", "swap"])
def test_a_disk_that_is_full_leaves_everything_as_it_was(
    place: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if place == "replaced":
        export(DRAFT, out, target=TARGET)
    elif place == "empty":
        out.mkdir()
    draft, before = changed(tmp_path, norm_output=True), held(tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rename = Path.rename

    def last_rename(self: Path, there: Path) -> Path:
        return full() if self.name in ("draft", "config.json") else rename(self, there)  # type: ignore[return-value]

    if fails == "swap":
        monkeypatch.setattr(Path, "rename", last_rename)
    else:
        monkeypatch.setattr(*{"copy": (shutil, "copyfile"), "sync": (os, "fsync")}[fails], full)
    with pytest.raises(RecordingError, match=r"^cannot write .*out: No space left on device") as caught:
        export(draft, out, target=TARGET, force=place == "replaced")
    monkeypatch.undo()
    assert caught.value.exit_status == 2
    assert held(out) == before
    assert {one.name for one in tmp_path.iterdir()} == {"changed", "out"} - ({"out"} if place == "missing" else set())


@pytest.mark.parametrize("empty", [True, False])
def test_what_is_put_there_while_a_draft_is_written_stays(
    empty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copyfile = tmp_path / "out", shutil.copyfile
    out.mkdir()
    if not empty:
        export(DRAFT, out, target=TARGET)
    before = {one.name for one in out.iterdir()}

    def slowly(*places: Path) -> None:
        (out / "notes.md").write_text("mine")
        copyfile(*places)

    monkeypatch.setattr(shutil, "copyfile", slowly)
    with pytest.raises(OutputExistsError, match="was changed while the draft was written"):
        export(DRAFT, out, target=TARGET, force=True)
    assert {one.name for one in out.iterdir()} == before | {"notes.md"}


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
