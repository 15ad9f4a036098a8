"""A draft of two layers: speculators and SGLang spell the norm that the second starts with differently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from eagle_trace.sites import site_of_parameter
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import SECOND_NAMES, export
from eagle_trace_analysis.checkpoint.files import open_checkpoint
from eagle_trace_analysis.engines.sglang.engine import entering_norm
from tests.support import checkpoints as make

SPECULATORS, SGLANG = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"


def two_layers() -> make.Tensors:
    """Tensors of a draft whose second layer is a plain decoder layer, as speculators has it."""
    held = make.draft_tensors()
    for name in [name for name in held if name.startswith("layers.0.") and "hidden_norm" not in name]:
        second = (
            held[name][..., : make.HIDDEN]
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            else held[name]
        )
        held[name.replace("layers.0.", "layers.1.")] = np.ascontiguousarray(second[..., ::-1])
    return held


@pytest.fixture(params=[1, 3], ids=["one file", "three shards"])
def draft(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    config = make.speculators_config()
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    return make.write_checkpoint(tmp_path / "draft", config, two_layers(), shards=request.param)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make.write_checkpoint(tmp_path / "target", make.decoder_config(make.LAYERS), make.target_tensors())


def bits(folder: Path, name: str) -> NDArray[np.uint16]:
    return open_checkpoint(folder).tensors[name].read().view(np.uint16)


def failed(draft: Path, target: Path, reference: Path) -> dict[str, str]:
    found = check(draft, target=target, reference=reference).findings
    return {one.name: f"{one.cause}: {one.evidence}" for one in found if one.status == "fail"}


def test_export_writes_the_norm_under_both_names_bit_for_bit(draft: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(draft, out, target=target) == []
    assert np.array_equal(bits(out, SGLANG), bits(draft, SPECULATORS))
    assert np.array_equal(bits(out, SPECULATORS), bits(draft, SPECULATORS))
    assert open_checkpoint(out).tensors.keys() - open_checkpoint(draft).tensors.keys() == {SGLANG}
    assert open_checkpoint(out).unlisted == ()


def test_both_forms_pass_the_check(draft: Path, target: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "out", target=target)
    assert failed(draft, target, draft) == {}
    assert failed(tmp_path / "out", target, draft) == {}


def test_a_copy_by_hand_fails_the_check_by_the_norms_name(draft: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(draft, out, target=target)
    (out / SECOND_NAMES).unlink()
    for index in out.glob("*.index.json"):
        index.write_bytes((draft / index.name).read_bytes())
    found = failed(out, target, draft)
    assert found.keys() == {"weights-present"}
    assert found["weights-present"].startswith("weights-missing: 1 of ")
    assert SGLANG in found["weights-present"]


def test_a_draft_of_one_layer_gets_no_second_names(target: Path, tmp_path: Path) -> None:
    draft = make.write_checkpoint(tmp_path / "one", make.speculators_config(), make.draft_tensors())
    export(draft, tmp_path / "out", target=target)
    assert not (tmp_path / "out" / SECOND_NAMES).exists()


def test_the_norm_shows_at_the_second_layers_start() -> None:
    assert site_of_parameter(SPECULATORS) == "layer.1.hidden_norm"
    assert site_of_parameter("layers.0.input_layernorm.weight") == "layer.0.embed_norm"
    assert entering_norm(SPECULATORS) == SGLANG
    assert entering_norm("layers.0.input_layernorm.weight") is None
    assert entering_norm("layers.1.input_layernorm.bias") is None
