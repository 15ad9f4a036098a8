"""The fixture `eagle_trace` in somebody's own tests: one passes, one fails with the report as its text."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEST = """
GOLDEN = {golden!r}

def test_healthy(eagle_trace):
    eagle_trace.assert_agrees(eagle_trace.diff(GOLDEN + "/train.trace", GOLDEN + "/healthy.trace", max_drop=0.05))

def test_broken(eagle_trace):
    eagle_trace.assert_agrees(eagle_trace.diff(GOLDEN + "/train.trace", GOLDEN + "/broken.trace"))
"""


def test_a_failure_is_the_report_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST.format(golden=str(ROOT / "tests" / "golden")))
    paths = [str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "eagle_trace.pytest_plugin", str(tmp_path)],
        cwd=tmp_path, check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "diverged: train and serve first part at fused, step 0 (shape)" in done.stdout
    assert "fix: set eagle_config.use_aux_hidden_state to true" in done.stdout
    assert "Traceback" not in done.stdout
    assert "pytest_plugin.py" not in done.stdout.partition("short test summary")[0]


def test_the_plugin_is_registered_and_costs_nothing_until_it_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"eagle_trace": "eagle_trace.pytest_plugin"}
    code = "import sys, eagle_trace.pytest_plugin; print(sorted({'numpy', 'pyarrow', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
