"""Whether a parameter as loaded is the trained one: by digests, also across dtypes; and the sample of a target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_trace.checkpoints import sampled_tensors, target_sample
from eagle_trace.recording.params import parameter_row
from eagle_trace_analysis.checkpoint.files import StoredTensor, read_header
from eagle_trace_analysis.tensors.loaded import apart

BF16 = ml_dtypes.bfloat16


def drawn(seed: int = 0) -> Any:
    return (0.02 * np.random.default_rng(seed).standard_normal((64, 48))).astype(np.float32)


def stored(file: Path, **arrays: Any) -> dict[str, StoredTensor]:
    save_file(arrays, file)
    return {one.name: one for one in read_header(file)}


def rows(**arrays: Any) -> dict[str, Any]:
    return {name: parameter_row(name, name, one, in_checkpoint=True) for name, one in arrays.items()}


def int8(x: Any) -> Any:
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    return (np.round(x / step) * step).astype(np.float32)


def test_a_draft_trained_in_fp32_and_served_in_bf16_has_the_trained_weights(tmp_path: Path) -> None:
    was = stored(tmp_path / "was.safetensors", w=drawn())
    assert apart(rows(w=drawn()), rows(w=drawn().astype(BF16)), was, was) == []


def test_a_quantised_draft_is_told_from_a_rounded_one_though_their_norms_are_alike(tmp_path: Path) -> None:
    was = stored(tmp_path / "was.safetensors", w=drawn())
    held = stored(tmp_path / "held.safetensors", w=int8(drawn()))
    trained, served = rows(w=drawn()), rows(w=int8(drawn()).astype(BF16))
    assert abs(trained["w"]["norm"] / served["w"]["norm"] - 1) < 1e-3
    (found,) = apart(trained, served, was, held)
    assert (found.name, found.held) == ("w", held["w"])


def test_a_deployed_tensor_that_is_not_what_was_loaded_is_not_taken_for_it(tmp_path: Path) -> None:
    was = stored(tmp_path / "was.safetensors", w=drawn())
    held = stored(tmp_path / "held.safetensors", w=drawn(1))
    (found,) = apart(rows(w=drawn()), rows(w=drawn(2)), was, held)
    assert found.held is None


def test_rows_moved_in_a_parameter_of_several_ranks_are_seen_in_the_deployed_folder(tmp_path: Path) -> None:
    """One that was put together from shards has no digest, and the norm of the trained one."""
    was = stored(tmp_path / "was.safetensors", w=drawn())
    held = stored(tmp_path / "held.safetensors", w=np.ascontiguousarray(drawn()[::-1]))
    trained = rows(w=drawn())
    served = {"w": trained["w"] | {"digest": ""}}
    assert apart(trained, served, was, was) == []
    (found,) = apart(trained, served, was, held)
    assert found.held == held["w"]


def test_a_checkpoint_that_the_training_has_left_behind_is_not_held_against_the_server(tmp_path: Path) -> None:
    """The training went on: what it computes with is no longer what its folder holds, and what is served is."""
    was = stored(tmp_path / "was.safetensors", w=drawn(1))
    assert apart(rows(w=drawn()), rows(w=drawn().astype(BF16)), was, {}) == []
    (found,) = apart(rows(w=drawn()), rows(w=1.1 * drawn()), was, {})
    assert found.was is None


def test_a_sample_of_a_target_tells_another_one_and_another_dtype(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "late", "bf16")]
    layers = {f"model.layers.{n}.w": drawn(n) for n in range(40)}
    for folder in folders:
        folder.mkdir()
    late = {name: 1.01 * one if name.endswith("39.w") else one for name, one in layers.items()}
    for folder, held in zip(folders, (layers, layers, late), strict=False):
        save_file(held, folder / "model.safetensors")
    save_file({name: one.astype(BF16) for name, one in layers.items()}, folders[3] / "model.safetensors")
    one, same, other, rounded = (sampled_tensors(folder) for folder in folders)
    assert len(one) == 40
    assert one == same
    assert [name for name in one if one[name] != other[name]] == ["model.layers.39.w"]
    assert {text.split()[0] for text in rounded.values()} == {"BF16"}


def test_of_many_experts_the_first_of_each_layer_is_sampled(tmp_path: Path) -> None:
    held = {f"model.layers.{n}.mlp.experts.{e}.up.weight": drawn(e)[:2] for n in range(3) for e in range(50)}
    save_file(held, tmp_path / "model.safetensors")
    assert set(sampled_tensors(tmp_path)) == {f"model.layers.{n}.mlp.experts.0.up.weight" for n in range(3)}


def test_a_target_that_cannot_be_sampled_has_no_sample(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert target_sample(tmp_path) == {}
    assert target_sample(tmp_path / "nowhere") == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a FIFO to hang on")
def test_a_disk_that_hangs_costs_the_host_no_more_than_it_was_told_to_wait(tmp_path: Path) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    assert sampled_tensors(tmp_path, 0.05) == {}  # nobody ever writes to it
    # let the reader go
    os.close(os.open(pipe, os.O_WRONLY))
