"""`diff` gives no advice on a deployed draft that `check` of the same folder contradicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.files import open_checkpoint
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnose
from tests.support import checkpoints as make
from tests.support.pairs import DRAFT, TARGET

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture(scope="module")
def pair() -> tuple[Trace, Trace]:
    """A training on three features, and a server that feeds one."""
    return open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "broken.trace")


def deployed(folder: Path, *without: str) -> Path:
    """The trained draft with the flag off, without some of its tensors."""
    export(DRAFT, folder / "whole", target=TARGET)
    config = json.loads((folder / "whole" / "config.json").read_text())
    config["eagle_config"] |= {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    found = open_checkpoint(folder / "whole").tensors
    return make.write_checkpoint(
        folder / "deployed", config, {name: one.read() for name, one in found.items() if name not in without}
    )


def fix_of_diff(pair: tuple[Trace, Trace], draft: Path) -> str:
    given = Checkpoints(train_draft=DRAFT, serve_draft=draft, target=TARGET)
    confirmed = {one.cause: one for one in diagnose(diff(*pair), *pair, given).confirmed}
    return str(confirmed["single-layer-features"].fix)


def test_a_deployed_head_of_one_feature_is_not_told_to_take_three(pair: tuple[Trace, Trace], tmp_path: Path) -> None:
    draft = deployed(tmp_path, "fc.weight", "layers.0.hidden_norm.weight")
    assert [one for one in check(draft, target=TARGET).findings if one.status is Status.FAIL] == []
    fix = fix_of_diff(pair, draft)
    assert "holds no fc" in fix
    assert "to true" not in fix


def test_a_draft_whose_fc_takes_three_is_told_the_same_by_both(pair: tuple[Trace, Trace], tmp_path: Path) -> None:
    draft = deployed(tmp_path)
    (finding,) = (one for one in check(draft, target=TARGET).findings if one.status is Status.FAIL)
    assert (finding.name, fix_of_diff(pair, draft)) == ("aux-hidden-state", finding.fix)
