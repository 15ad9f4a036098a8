"""The gate on real recordings: a small golden trace, a pytest test, and the steps of the GitHub action run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from eagle_trace import Trace
from eagle_trace.pytest_plugin import EagleTrace
from tests.support import faults
from tests.support.pairs import DRAFT, TARGET
from tests.support.sarif import check_sarif
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
#: what the example in docs/gate.md records
ASK = {"max_new_tokens": 12, "level": "sketch"}


@pytest.fixture(scope="module")
def golden(serve: Callable[..., Trace]) -> Trace:
    """A trace of the healthy server as docs/gate.md has it recorded."""
    return serve(**ASK, dtype="auto")


@pytest.fixture
def broken(deployed: Path, tmp_path: Path) -> Path:
    """The demo's faulty deployment."""
    out = tmp_path / "broken"
    out.mkdir()
    for file in deployed.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    faults.single_layer_features(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_golden_trace_for_a_gate_is_under_a_megabyte(golden: Trace) -> None:
    path = Path(str(golden.path))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert len(golden.prompts) == 4
    assert size < 1_000_000, size


def test_a_healthy_server_passes_a_test_and_a_faulty_one_fails_it_with_the_report(
    golden: Trace, deployed: Path, broken: Path, four_prompts: Path, warm: Warm, tmp_path: Path
) -> None:
    fixture = EagleTrace(tmp_path)
    asked: dict[str, Any] = {"target": TARGET, "trained": DRAFT, "prompts": four_prompts, "baseline": golden.path}
    with warm():
        well = fixture.compare(**asked, **ASK, deployed=deployed, max_drop=0.05)
        ill = fixture.compare(**asked, **ASK, deployed=broken, max_drop=0.05)
    fixture.assert_agrees(well)
    assert well.gate is not None
    with pytest.raises(pytest.fail.Exception) as failed:
        fixture.assert_agrees(ill)
    assert "cause: single-layer-features" in str(failed.value)
    assert ill.gate is not None
    assert {one.name for one in ill.gate.failures} >= {"accept-length", "diverges-now"}


@pytest.mark.parametrize(("which", "status"), [("deployed", 0), ("broken", 1)])
def test_the_steps_of_the_action_run_by_hand(
    which: str,
    status: int,
    golden: Trace,
    request: pytest.FixtureRequest,
    four_prompts: Path,
    warm: Warm,
    tmp_path: Path,
) -> None:
    draft: Path = request.getfixturevalue(which)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    given = {name: str(one.get("default", "")) for name, one in action["inputs"].items()}
    given |= {
        "target": str(TARGET), "trained": str(DRAFT), "deployed": str(draft), "prompts": str(four_prompts),
        "baseline": str(golden.path), "arguments": "--max-new-tokens\n12\n--level\nsketch\n", "python": sys.executable,
    }  # fmt: skip
    assert given.keys() == action["inputs"].keys()
    variables = {
        name: given[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()
    }
    output, summary = tmp_path / "output", tmp_path / "summary"
    # recorded here, where a server starts in seconds; the step finds it and uses it again
    reports = tmp_path / "eagle-trace-reports"
    words = ["compare", "--target", TARGET, "--trained", DRAFT, "--deployed", draft, "--prompts", four_prompts]
    words += ["--max-new-tokens", "12", "--level", "sketch", "--keep", reports / "traces"]
    with warm():
        from typer.testing import CliRunner

        from eagle_trace.cli.main import app

        assert CliRunner().invoke(app, list(map(str, words))).exit_code == status
    done = subprocess.run(
        ["bash", "-c", step["run"]], cwd=tmp_path, check=False, capture_output=True, text=True,
        env=os.environ | variables | {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert output.read_text() == f"status={status}\n"
    told = (reports / "eagle-trace.txt").read_text()
    assert told in summary.read_text()
    assert ("gate: passed: " if status == 0 else "gate: failed") in told
    log = json.loads((reports / "eagle-trace.sarif").read_text())
    check_sarif(log)
    suite = ET.parse(reports / "eagle-trace.xml").getroot()[0]
    assert (int(suite.attrib["failures"]) > 0) == (status == 1)
    rules = {one["ruleId"] for one in log["runs"][0]["results"]}
    assert rules == (set() if status == 0 else {"accept-length", "diverges-now", "single-layer-features"} | rules)
