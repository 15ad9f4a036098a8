"""Other releases from the registry, laid over the installed ones.

An older SGLang records the demo pair with the same recorder, healthy; a speculators that computes otherwise is refused.
The SGLang is the oldest that runs beside the installed torch and transformers; docs/support.md has the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_sglang.releases import TESTED
from eagle_trace_speculators import releases
from tests.support.pairs import DRAFT, TARGET

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RELEASE = "0.5.20"
ROOT = Path(__file__).parents[2]
#: what pip says where it reached nobody; anything else that goes wrong is a failure
UNREACHABLE = ("connection broken", "Max retries exceeded", "ConnectionError", "NewConnectionError", "timed out")


def overlay(folder: Path, requirement: str) -> Path:
    """`folder` with that package alone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    asked = ["--no-deps", "--no-compile", "--target", str(folder), requirement]
    done = subprocess.run([*pip, *asked], check=False, capture_output=True, text=True)
    if done.returncode and any(word in done.stderr for word in UNREACHABLE):
        pytest.skip(f"the package registry cannot be reached, so there is no {requirement}: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return folder


def run(ahead: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`eagle-trace record` in a process of its own that finds the packages in `ahead` first."""
    paths = [str(ahead), str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "eagle_trace.cli.main", "record", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, deployed: Path, four_prompts: Path, folder: Path) -> Trace:
    """The demo pair recorded by the older SGLang (27 MB over the network)."""
    sglang = overlay(tmp_path_factory.mktemp("sglang"), f"sglang=={RELEASE}")
    out = folder / f"sglang-{RELEASE}.trace"
    paths = ["--target", TARGET, "--draft", deployed, "--prompts", four_prompts, "--out", out]
    options = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "24"]
    done = run(sglang, "--mode", "serve", *paths, *options)
    assert done.returncode == 0, done.stderr
    return open_trace(out)


def test_another_release_records_a_healthy_pair(other: Trace, train: Callable[..., Trace]) -> None:
    assert other.manifest.packages["sglang"] == RELEASE
    train_trace = train(replay=other.path)
    result = diagnosed(diff(train_trace, other), train_trace, other)
    assert result.verdict == "agree", result.first_divergence
    assert result.coverage.matched == result.coverage.train_rows > 100
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()
    assert result.accept_length.observed >= 1.8


def test_two_releases_agree_and_are_called_by_their_versions(other: Trace, serve: Callable[..., Trace]) -> None:
    installed = serve()
    result = diagnosed(diff(other, installed), other, installed)
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()
    assert result.coverage.matched > 100
    assert (result.roles.reference, result.roles.other) == (f"sglang {RELEASE}", f"sglang {TESTED[0]}")


def test_it_is_one_of_the_supported_and_says_what_it_cannot(other: Trace) -> None:
    assert RELEASE in TESTED
    (warning,) = other.manifest.warnings
    assert warning.startswith(f"SGLang {RELEASE} verifies greedily on a CPU")
    assert not [one for one in other.manifest.not_materialised if one["rows"] == "all"]


def test_the_installed_release_is_supported_without_a_word() -> None:
    from eagle_trace_sglang.releases import RELEASES, check_release

    name, _ = RELEASES.installed()
    assert name == TESTED[0]
    assert check_release("cpu") == check_release("cuda") == []
    assert releases.check_release() == []


@pytest.mark.parametrize(
    ("release", "why"), [("0.8.1", "sees all rows of that step"), ("0.6.0.2", "has no eager attention")]
)
def test_a_speculators_that_computes_otherwise_is_refused(release: str, why: str, tmp_path: Path) -> None:
    older = overlay(tmp_path / "speculators", f"speculators=={release}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p", "input_ids": [1, 2, 3, 4]}')
    out = tmp_path / "train.trace"
    options = ["--target", TARGET, "--draft", DRAFT, "--prompts", prompts, "--out", out, "--device", "cpu"]
    done = run(older, "--mode", "train", *options)
    assert done.returncode == 2, done.stderr
    assert f"speculators {release} is not supported" in done.stderr
    assert why in done.stderr
    assert "pip install 'speculators==0.9.0'" in done.stderr
    assert not out.exists()


def test_the_document_names_the_supported_releases() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/support.md").read_text(encoding="utf-8").split("## vLLM")[0].splitlines()
        if line.startswith("| 0.")
    ]
    recorded = [row[0] for row in rows if "agrees" in row[3]]
    assert recorded == list(TESTED), json.dumps(rows, indent=1)
