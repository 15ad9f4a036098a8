"""The static check on drafts whose tensors or files are out of the ordinary: right as they are, or one fault each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from tests.support import checkpoints as make
from tests.support.check_cases import named, troubles
from tests.support.published_cases import PUBLISHED
from tests.support.quantised_cases import QUANTISED, as_method
from tests.support.quantised_forms import METHODS
from tests.support.tensor_cases import CASES, Case, flat, tensors


@pytest.mark.parametrize("case", [*CASES, *QUANTISED, *PUBLISHED], ids=lambda case: case.name)
def test_a_case_is_judged_as_the_engine_takes_it(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path)
    found = troubles(check(tmp_path))
    words = {name: finding.evidence for name, finding in found.items()}
    failed = [name for name, finding in found.items() if finding.status is Status.FAIL]
    assert failed == ([case.finding] if case.finding else []), words
    assert {*found} - {*failed} == {*case.warns}, words
    if case.finding:
        assert case.words in found[case.finding].evidence
        assert case.fix in found[case.finding].fix


@pytest.mark.parametrize("method", METHODS)
def test_values_that_were_not_read_are_not_called_finite(method: str, tmp_path: Path) -> None:
    as_method(method)(tmp_path)
    finding = named(check(tmp_path), "finite")
    packed = METHODS[method][1].__name__ in ("int8_rows", "int4", "nvfp4", "nvfp4_compressed", "awq", "gptq")
    assert ("not checked" in finding.evidence) == packed


@pytest.mark.parametrize(
    ("more", "status"), [(0, Status.PASS), (20, Status.WARN), (-4, Status.WARN), (100, Status.FAIL)]
)
def test_a_vocabulary_that_differs_by_padding_is_not_another_targets(more: int, status: Status, tmp_path: Path) -> None:
    size = 4 * make.VOCABULARY
    target = make.decoder_config(make.LAYERS) | {"vocab_size": size}
    folder = make.write_checkpoint(tmp_path / "target", target, {"x": np.ones(1, np.float32)})
    draft = make.write_checkpoint(tmp_path / "draft", flat(vocab_size=size + more), tensors("t2d"))
    found = troubles(check(draft, target=folder))
    assert {name: one.status for name, one in found.items()} == (
        {} if status is Status.PASS else {"vocabulary": status}
    )


def test_a_tie_is_right_where_the_target_is_tied_too(tmp_path: Path) -> None:
    next(case for case in PUBLISHED if case.name == "tied, all ids, no head").write(tmp_path / "draft")
    target = make.decoder_config(make.LAYERS) | {"tie_word_embeddings": True}
    folder = make.write_checkpoint(tmp_path / "target", target, {"x": np.ones(1, np.float32)})
    assert not troubles(check(tmp_path / "draft", target=folder))


def test_a_head_of_one_feature_fits_no_target_of_another_width(tmp_path: Path) -> None:
    next(case for case in CASES if case.name == "one feature").write(tmp_path / "draft")
    for width, status in ((make.HIDDEN, Status.PASS), (2 * make.HIDDEN, Status.FAIL)):
        target = make.decoder_config(make.LAYERS) | {"hidden_size": width}
        folder = make.write_checkpoint(tmp_path / str(width), target, {"x": np.ones(1, np.float32)})
        assert named(check(tmp_path / "draft", target=folder), "fc-width").status is status
