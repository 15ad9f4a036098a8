"""Diagnosis as a whole: what it needs, what it says in the reports, and the page written from its registry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.causes import REGISTRY
from eagle_trace_analysis.causes.document import render as causes_page
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnose, diagnosed
from eagle_trace_analysis.report.json import to_json
from eagle_trace_analysis.report.text import render
from tests.support.endings import ending_of
from tests.support.numpy_target import read_tensors
from tests.support.pairs import DRAFT, TARGET
from tests.support.planted import Planted, run
from tests.support.planted_faults import faults
from tests.support.tables import replace_table

GOLDEN = Path(__file__).parents[3] / "golden"
HERE = Checkpoints(train_draft=DRAFT, target=TARGET)


@pytest.fixture(scope="module")
def golden() -> dict[str, Trace]:
    return {name: open_trace(GOLDEN / f"{name}.trace") for name in ("train", "healthy", "broken")}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diff, Trace, Trace]:
    return run(Planted("healthy", None, None), tmp_path_factory.mktemp("healthy"))


def test_the_page_of_causes_is_up_to_date() -> None:
    page = Path(__file__).parents[4] / "docs" / "causes.md"
    assert page.read_text(encoding="utf-8") == causes_page(), (
        "python -m eagle_trace_analysis.causes.document docs/causes.md"
    )


def test_a_recorded_healthy_pair_confirms_nothing(golden: dict[str, Trace]) -> None:
    result = diff(golden["train"], golden["healthy"])
    diagnosis = diagnose(result, golden["train"], golden["healthy"], HERE)
    assert diagnosis.confirmed == ()
    assert diagnosis.faulty == ()
    assert sum(one.verdict == "reproduced" for one in diagnosis.replay) > 60


def test_the_fault_of_the_story_is_confirmed_alone(golden: dict[str, Trace]) -> None:
    result = diff(golden["train"], golden["broken"])
    diagnosis = diagnose(result, golden["train"], golden["broken"], HERE)
    (cause,) = diagnosis.confirmed
    assert (cause.cause, cause.site) == ("single-layer-features", "fused")
    assert "[T, 128]" in cause.evidence
    assert "[T, 384]" in cause.evidence
    assert "use_aux_hidden_state" in str(cause.fix)
    # what cost days in the story is said to be innocent, with numbers
    innocent = {one.cause: one.evidence for one in diagnosis.of("ruled_out")}
    # digests of the time when these were recorded are not compared: the ids that were seen tell
    assert "48 of 48 draft ids" in innocent["d2t-absolute"]
    assert {"weights-dropped", "lm-head-tied", "lm-head-from-target"} <= set(innocent)


def test_a_map_that_is_right_as_loaded_is_not_said_to_be_wrong_in_its_file(tmp_path: Path) -> None:
    """The engine maps by something else: copying d2t once more would change nothing."""
    served = read_tensors(DRAFT)["d2t"] + 1
    result, _, _ = run(Planted("map", "d2t-stale", "topk.target_id", serve={"d2t": served}), tmp_path)
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert cause.cause == "d2t-stale"
    assert "d2t as loaded is the trained one" in str(cause.fix)


def test_without_checkpoints_nothing_is_confirmed_that_needs_them(
    healthy: tuple[Diff, Trace, Trace], tmp_path: Path
) -> None:
    result, train, serve = run(next(case for case in faults() if case.name == "norm-eps"), tmp_path / "fault")
    nowhere = Checkpoints(train_draft=tmp_path / "gone", serve_draft=tmp_path / "gone", target=tmp_path / "gone")
    diagnosis = diagnose(result, train, serve, nowhere)
    (eps,) = (one for one in diagnosis.causes if one.cause == "norm-eps")
    assert eps.verdict == "not_tested"
    assert "gone" in eps.evidence
    assert "--train-draft" in str(eps.fix)
    assert not diagnosis.confirmed
    assert diagnosis.unexplained


def test_traces_without_values_leave_counterfactuals_untested(golden: dict[str, Trace]) -> None:
    train, serve = golden["train"], golden["broken"]
    serve = open_trace(serve.path)
    serve.manifest.level = "stats"
    diagnosis = diagnose(diff(train, golden["broken"]), train, serve, HERE)
    assert [one.cause for one in diagnosis.confirmed] == ["single-layer-features"]
    left = {one.cause: one for one in diagnosis.of("not_tested")}
    assert {"norm-eps", "rope-theta", "residual-norm"} <= set(left)
    assert all(one.fix for one in left.values())


def test_the_confirmed_cause_stands_right_below_the_answer_at_the_end(golden: dict[str, Trace]) -> None:
    result = diagnosed(diff(golden["train"], golden["broken"]), golden["train"], golden["broken"], HERE)
    lines = render(result).splitlines()
    last = ending_of(render(result))
    assert last[4].startswith("cause: single-layer-features")
    assert any(line.startswith("  fix: ") for line in last[5:])
    assert len(last) <= 12
    titles = [line for line in lines if line.startswith(("cause", "why", "ruled out", "not tested"))]
    names = [title.split(" (")[0].split(":")[0] for title in titles]
    assert names == ["ruled out", "not tested", "why", "cause", "cause"]
    assert max(map(len, lines)) <= 80


def test_a_healthy_report_says_in_one_line_that_nothing_was_confirmed(healthy: tuple[Diff, Trace, Trace]) -> None:
    assert f"causes: 0 confirmed, {len(REGISTRY)} ruled out, 0 not tested" in render(healthy[0])


def test_json_holds_every_cause_and_every_step(golden: dict[str, Trace]) -> None:
    result = diagnosed(diff(golden["train"], golden["broken"]), golden["train"], golden["broken"], HERE)
    data = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert len(data["diagnosis"]) == len(REGISTRY)
    assert data["diagnosis"][0]["cause"] == "single-layer-features"
    assert all((one["fix"] is not None) == (one["verdict"] == "confirmed") for one in data["diagnosis"])
    assert {"reproduced", "not replayed"} == {one["verdict"] for one in data["replay"]}
    assert to_json(diff(golden["train"], golden["broken"]))["diagnosis"] is None


def test_names_from_outside_cannot_steer_a_terminal(golden: dict[str, Trace]) -> None:
    result = diagnosed(diff(golden["train"], golden["broken"]), golden["train"], golden["broken"], HERE)
    assert result.diagnosis is not None
    bad = replace(result.diagnosis.causes[0], evidence="a \x1b[31mred\x07 name")
    text = render(replace(result, diagnosis=replace(result.diagnosis, causes=(bad,))))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_the_training_forward_predicts_what_a_healthy_server_gets(healthy: tuple[Diff, Trace, Trace]) -> None:
    accept = healthy[0].accept_length
    assert accept.predicted == pytest.approx(accept.observed)
    assert accept.predicted_by_depth == pytest.approx(accept.by_depth)
    assert (accept.predicted_basis, accept.undecided, accept.better, accept.worse) == ("walk", 0, 0, 0)


def test_a_broken_server_is_predicted_what_the_healthy_one_gets(
    healthy: tuple[Diff, Trace, Trace], tmp_path: Path
) -> None:
    result, _, _ = run(next(case for case in faults() if case.name == "single-layer"), tmp_path)
    accept = result.accept_length
    assert accept.observed is not None
    assert accept.observed < 1.5
    assert accept.predicted == pytest.approx(healthy[0].accept_length.observed, abs=0.1)
    assert accept.better > accept.worse


def test_prediction_takes_the_rounds_whose_rows_are_there(golden: dict[str, Trace], tmp_path: Path) -> None:
    result, train, serve = run(next(case for case in faults() if case.name == "single-layer"), tmp_path)
    table = train.table("topk")
    paths, steps = table.column("path").to_pylist(), table.column("step").to_numpy()
    rows = serve.rows
    drafted = {(int(r), tuple(p)) for r, p in zip(rows.root, rows.paths(), strict=True)}
    kept = [
        not s or (r, tuple(p)) in drafted
        for r, p, s in zip(table.column("root").to_pylist(), paths, steps, strict=True)
    ]
    replace_table(train.path, "topk", table.filter(np.array(kept)))
    accept = diff(open_trace(train.path), serve).accept_length
    assert accept.predicted_basis == "rounds"
    assert accept.undecided > 0
    assert accept.predicted_rounds == accept.rounds == result.accept_length.rounds
