"""The check's word on odd tensors and files, held against the installed SGLang's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from tests.support import checkpoints as make
from tests.support.quantised_cases import QUANTISED
from tests.support.tensor_cases import CASES, FINE, PARTLY, REFUSES, Case
from tests.support.tensor_judge import ask

pytest.importorskip("sglang")
pytestmark = pytest.mark.integration

ALL = [*CASES, *QUANTISED]
#: left at its start and never applied, or applied as ones
IDLE = ("model.fc.", "model.layers.0.hidden_norm.")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("judge")
    model = make.write_checkpoint(root / "model", make.decoder_config(1), make.target_tensors())
    folders = []
    for number, case in enumerate(ALL):
        folders.append(root / str(number))
        case.write(folders[-1])
    found = ask(root / "exchange", model, folders)
    import os

    if os.environ.get("TZ_DUMP"):
        import json

        Path(os.environ["TZ_DUMP"]).write_text(json.dumps({c.name: v for c, v in zip(ALL, found)}, indent=1))
    return {case.name: (path, one) for case, path, one in zip(ALL, folders, found, strict=True)}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_engine_does_what_the_case_says(verdicts: dict[str, tuple[Path, dict[str, Any]]], case: Case) -> None:
    _, verdict = verdicts[case.name]
    if case.engine == REFUSES:
        assert verdict["error"]
        return
    assert verdict["error"] is None
    unset = [name for name in verdict["unset"] if not (name.startswith(IDLE) and case.engine == FINE)]
    assert bool(unset or verdict["dropped"]) == (case.engine == PARTLY), verdict


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_what_the_engine_refuses_or_leaves_at_its_start_never_passes(
    verdicts: dict[str, tuple[Path, dict[str, Any]]], case: Case
) -> None:
    path, verdict = verdicts[case.name]
    try:
        failed = [one.name for one in check(path).findings if one.status is Status.FAIL]
    except CheckpointError:
        failed = ["unreadable"]
    if verdict["error"] or any(not name.startswith(IDLE) for name in verdict["unset"]):
        assert failed, verdict
    if case.engine == FINE and not case.finding:
        assert not failed
