"""Weights that torch saved: read as torch reads them, taken where SGLang takes them, and never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.files import StoredTensor, open_checkpoint
from tests.support import checkpoints as make
from tests.support.check_cases import named, troubles
from tests.support.tensor_cases import flat, tensors

torch = pytest.importorskip("torch")
from tests.support.torch_files import STATE, as_torch, write  # noqa: E402 (needs torch)


def numbers(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    pieces = [piece.copy() for piece in tensor.pieces(100)]
    return np.concatenate(pieces or [tensor.read()]).reshape(tensor.shape)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt"])
def test_every_value_is_the_one_torch_saved(name: str, zipped: bool, tmp_path: Path) -> None:
    parameters = {key: torch.nn.Parameter(one, requires_grad=False) for key, one in STATE.items()}
    parameters |= {"epoch": 3, "fp8": torch.ones(3).to(torch.float8_e4m3fn)}
    folder = write(tmp_path, parameters, name, _use_new_zipfile_serialization=zipped)
    found = open_checkpoint(folder).tensors
    assert set(found) == {*STATE, "fp8"}
    for key, value in tensors().items():
        assert found[key].read().dtype == value.dtype
        assert np.array_equal(numbers(found[key]), value)
        assert np.array_equal(found[key].read(), value)
    assert np.array_equal(found["fc.weight"].rows([5, 3]), tensors()["fc.weight"][[5, 3]])
    assert found["fp8"].read().tolist() == [1, 1, 1]


def test_views_of_one_storage_and_transposed_matrices_are_read_in_order(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    views = {"part": base[2:4], "column": base[:, 3], "turned": base.t(), "one": base[5, 9], "none": base[:0]}
    found = open_checkpoint(write(tmp_path, views)).tensors
    for name, view in views.items():
        assert np.array_equal(found[name].read(), view.numpy()), name
        assert np.array_equal(numbers(found[name]), view.numpy()), name
    assert np.array_equal(found["turned"].rows([1, 7]), base.t()[[1, 7]].numpy())


def test_a_bin_is_checked_like_any_other_file(tmp_path: Path) -> None:
    result = check(write(tmp_path))
    assert troubles(result) == {}
    assert "are finite" in named(result, "finite").evidence
    broken = OrderedDict(STATE) | {"fc.weight": STATE["fc.weight"] * float("nan")}
    assert "fc.weight" in troubles(check(write(tmp_path / "nan", broken)))["finite"].evidence


def test_a_target_of_bin_files_has_weights(tmp_path: Path) -> None:
    target = tmp_path / "target"
    make.write_checkpoint(target, make.decoder_config(make.LAYERS), {})
    (target / "model.safetensors").unlink()
    parts = [{key: as_torch(value)} for key, value in make.target_tensors().items()]
    for number, part in enumerate(parts):
        torch.save(part, target / f"pytorch_model-{number + 1:05}-of-00002.bin")
    draft = make.write_checkpoint(tmp_path / "draft", flat(), make.draft_tensors())
    assert "rows compared equal the target's" in named(check(draft, target=target), "embedding").evidence


def test_safetensors_go_before_bin_and_bin_before_pt(tmp_path: Path) -> None:
    make.write_checkpoint(tmp_path, flat(), tensors())
    write(tmp_path, {"fc.weight": torch.zeros(1)})
    finding = named(check(tmp_path), "weight-names")
    assert "leaves pytorch_model.bin" in finding.evidence
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, STATE)
    write(tmp_path, {"fc.weight": torch.zeros(1)}, "other.pt")
    write(tmp_path, {"step": 1}, "training_args.bin")
    assert troubles(check(tmp_path)) == {}


def test_a_shard_that_an_index_of_bin_files_names_and_nobody_shipped_is_missing_weights(tmp_path: Path) -> None:
    write(tmp_path, {key: one for key, one in STATE.items() if not key.startswith("fc.")})
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"fc.weight": "pytorch_model-2.bin"}}')
    assert "fc.weight" in troubles(check(tmp_path))["weights-present"].evidence


def test_export_writes_a_bin_as_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", {key: as_torch(value) for key, value in make.draft_tensors().items()})
    (folder / "config.json").write_text(json.dumps(make.speculators_config()))
    assert troubles(check(folder)) == {}
    export(folder, tmp_path / "out")
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == [".eagle-trace-export", "config.json", "model.safetensors"]
    result = check(tmp_path / "out", reference=folder)
    assert troubles(result) == {}
    assert result.changes == []


class Hostile:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_file_is_run(zipped: bool, tmp_path: Path) -> None:
    trap = tmp_path / "run"
    for number, call in enumerate([(os.mkdir, str(trap)), (eval, f"open({str(trap)!r}, 'w')"), (exec, "1")]):
        state = {"fc.weight": STATE["fc.weight"], "x": Hostile(*call)}
        folder = write(tmp_path / str(number), state, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match="to be unpickled, which no file of plain weights does"):
            check(folder)
    assert not trap.exists()


def _rezipped(content: bytes, how: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", how) as new:
        for entry in old.infolist():
            end = entry.filename.rpartition("/")[2].replace(".", "_")
            new.writestr(entry.filename, changed.get(end, old.read(entry)))
    return out.getvalue()


def test_damaged_and_foreign_files_are_one_sentence(tmp_path: Path) -> None:
    whole = (write(tmp_path / "whole") / "pytorch_model.bin").read_bytes()
    old = (write(tmp_path / "old", _use_new_zipfile_serialization=False) / "pytorch_model.bin").read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "damaged"),
        "text": (b"version https://git-lfs.github.com/spec/v1\n", "damaged"),
        "cut": (whole[: len(whole) // 2], "damaged"),
        "cut legacy": (old[:-10], "truncated"),
        "cut legacy pickle": (old[:300], "damaged"),
        "compressed": (_rezipped(whole, zipfile.ZIP_DEFLATED), "compressed"),
        "big endian": (_rezipped(whole, byteorder=b"big"), "big-endian"),
        "short storage": (_rezipped(whole, **{"0": b"12"}), "beyond what is stored"),
        "no pickle": (_rezipped(whole, data_pkl=b"x"), "damaged"),
        "a list": (_rezipped(whole, data_pkl=pickle.dumps([1])), "state_dict"),
        "nested": (_rezipped(whole, data_pkl=pickle.dumps({"model": {}})), "looks no deeper"),
        "another archive": (_zip_of({"a": b"b"}), "damaged"),
    }
    for name, (content, words) in cases.items():
        folder = make.write_checkpoint(tmp_path / name, flat(), {})
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            check(folder)


def _zip_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("zipped", [True, False])
def test_no_damage_ends_in_a_traceback(zipped: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, {"fc.weight": torch.ones(4, 4), "t": torch.ones(3, 2).t()},
                   _use_new_zipfile_serialization=zipped)  # fmt: skip
    file = folder / "pytorch_model.bin"
    whole, draw = file.read_bytes(), np.random.default_rng(0)
    read = 0
    for _ in range(400):
        content = bytearray(whole)
        for at in draw.integers(0, len(whole), int(draw.integers(1, 4))):
            content[at] = int(draw.integers(256))
        file.write_bytes(content)
        try:
            for tensor in open_checkpoint(folder).tensors.values():
                tensor.read() if tensor.size < 1000 else None
                read += 1
        except CheckpointError:
            continue
    assert read > 0


@pytest.mark.parametrize(
    ("file", "words"),
    [("draft.gguf", "GGUF"), ("draft.pth", "draft.pth, which SGLang does not load"), ("notes.txt", "has no weights")],
)
def test_files_that_sglang_does_not_load_are_named(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flat()))
    (tmp_path / file).write_bytes(b"1")
    with pytest.raises(CheckpointError, match=words):
        check(tmp_path)


def test_the_recorder_finds_the_names_of_a_bin_without_reading_its_numbers(tmp_path: Path) -> None:
    from eagle_trace_serving.stored import checkpoint_names

    folder = write(tmp_path, {f"model.{key}": one for key, one in STATE.items()})
    torch.save({"lr": 1}, folder / "training_args.bin")
    # the engine looks for a head beside its inner model only
    found = {"model.lm_head.weight" if key == "lm_head.weight" else key: f"model.{key}" for key in STATE}
    assert checkpoint_names(folder) == found
    make.write_safetensors(folder / "model.safetensors", {"midlayer.fc": np.ones(1, np.float32)})
    assert checkpoint_names(folder) == {"layers.0.fc": "midlayer.fc"}
