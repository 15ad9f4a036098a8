"""`eagle-trace compare` where vLLM lives: against training, and against SGLang in the other environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace_analysis.checkpoint.export import export
from tests.support.pairs import DRAFT, TARGET
from tests.support.warm.start import Warm

pytestmark = pytest.mark.vllm

#: the environment that `make setup` makes, with SGLang in it
OTHER = Path(__file__).parents[2] / ".venv/bin/python"


def compare(*words: object, keep: Path) -> tuple[int, str]:
    asked = ["compare", "--target", TARGET, "--dtype", "float32", "--max-new-tokens", 12, "--keep", keep, *words]
    done = CliRunner().invoke(app, [str(word) for word in asked])
    return done.exit_code, done.output


def test_a_trained_draft_is_served_by_vllm_as_it_is(four_prompts: Path, tmp_path: Path, warm: Warm) -> None:
    with warm():
        status, said = compare("--trained", DRAFT, "--host", "vllm", "--prompts", four_prompts, keep=tmp_path)
    assert status == 0, said
    assert "check: 0 failed" in said
    assert "agree: 81 sites and steps are equal within tolerance" in said
    assert open_trace(tmp_path / "serve.trace").manifest.draft["path"] == str(DRAFT)


def test_sglang_and_vllm_agree_on_a_draft_that_each_loads_in_its_own_form(
    four_prompts: Path, tmp_path: Path, warm: Warm
) -> None:
    if not OTHER.exists():
        pytest.skip("there is no environment with SGLang: make setup")
    flat = tmp_path / "flat"
    export(DRAFT, flat, target=TARGET)
    words = ["--deployed", flat, "--host", "sglang", "--host", "vllm", "--env", OTHER, "--prompts", four_prompts]
    with warm():
        status, said = compare(*words, keep=tmp_path / "kept")
    assert status == 0, said
    assert "agree: 81 sites and steps are equal within tolerance" in said
    served = {one.host: one for one in (open_trace(tmp_path / "kept" / name).manifest for name in
                                        ("serve.trace", "other.trace"))}  # fmt: skip
    assert served["sglang"].draft["path"] == str(flat)
    assert served["vllm"].draft["path"] == str(tmp_path / "kept/deployed-vllm")
    assert served["vllm"].settings["layer_ids"] == [2, 4, 5]
