"""`check` and `diff` speak of one fault under one cause, and give no advice on a draft that contradicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import causes, diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.files import open_checkpoint
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnose
from tests.support import checkpoints as make
from tests.support.pairs import DRAFT, TARGET

GOLDEN = Path(__file__).parents[3] / "golden"
ROOT = Path(__file__).parents[4]


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


def causes_by_check() -> dict[str, set[str]]:
    """The causes that each check speaks of, as docs/check.md has them."""
    lines = (ROOT / "docs/check.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| check | cause | reads | fails (warns) when | passes when |") + 2 :]
    rows = [line.split("|") for line in table[: table.index("")]]
    return {row[1].strip(): {one.strip() for one in row[2].split(",") if one.strip()} for row in rows}


def test_every_check_speaks_of_causes_that_diff_knows_and_causes_of_checks_that_there_are() -> None:
    known = causes_by_check()
    assert len(known) > 25
    # what the dtype rounds is a note of `diff`
    assert set().union(*known.values()) - {"rounding"} <= causes.REGISTRY.keys()
    for finding in check(DRAFT, target=TARGET).findings:
        assert not finding.cause or finding.cause in known[finding.name]
    sources = "".join(path.read_text() for path in Path(causes.__file__).parent.glob("*.py"))
    asked = set(re.findall(r"(?:context\.(?:fix|failed)\(|as_trained\(\s*context,)\s*\"([a-z-]+)\"", sources))
    assert len(asked) > 8
    assert asked <= known.keys()
