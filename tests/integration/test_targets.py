"""Drafts of many target families on the real hosts: tiny random checkpoints, two SGLang starts for each family.

A healthy pair agrees, in the widest dtype that SGLang's class computes in; the same draft fed one layer instead of
three is named at `fused`. Where SGLang feeds something else than the layers, the diff says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from eagle_trace import Trace, open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_serving import process
from tests.support import faults, never_captures
from tests.support.tiny_speculators import Pair, write_prompts
from tests.support.tiny_targets import FAMILIES, FIRST_WORD, IDS, VOCAB, Family, write_family
from tests.support.unimported import unimported_in
from tests.support.verdicts import expect
from tests.support.warm.start import Warm

pytest.importorskip("speculators")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
#: families that SGLang serves on a CPU; of the others it has no class that can feed a draft
SERVED = [name for name in FAMILIES if name != "glm4"]
#: families of which SGLang 0.5.23 feeds the last MLP's output alone, without the stream it is added to
WITHOUT_RESIDUAL = ("gemma3_text", "gemma3")
#: modules of SGLang's that need kernels nobody has on a CPU: it serves none of their models there
UNIMPORTED = {"sglang.srt.models.falcon_mamba", "sglang.srt.models.mamba"}


@dataclass
class Target:
    """A family's pair, the deployed draft, and room for what is recorded of it."""

    name: str
    family: Family
    pair: Pair
    deployed: Path
    prompts: Path
    folder: Path
    warm: Warm

    def serve(self, draft: Path) -> Trace:
        """Record SGLang with `draft`."""
        from eagle_trace_serving.record import record

        with self.warm():
            out = record(
                target=self.pair.target,
                draft=draft,
                prompts=self.prompts,
                out=self.folder / f"{draft.name}.trace",
                dtype=self.family.dtype,
                device="cpu",
                max_new_tokens=8,
                host_args=("--skip-tokenizer-init", *self.family.sglang),
            )
        return open_trace(out)

    def diffed(self, served: Trace) -> Diff:
        """The serving against the training on its tokens."""
        from eagle_trace_speculators.record import record

        out = self.folder / f"train-{Path(served.path).stem}.trace"
        record(target=self.pair.target, draft=self.pair.draft, replay=served.path, out=out, device="cpu")
        train = open_trace(out)
        return diagnosed(diff(train, served), train, served)

    def single(self) -> Path:
        """The deployed draft, fed one layer."""
        return faults.edit(
            self.deployed,
            self.folder / "single",
            config=lambda config: config["eagle_config"].update(use_aux_hidden_state=False),
        )


def make(name: str, folder: Path, warm: Warm) -> Target:
    """Write a family's pair and deploy its draft."""
    pair = write_family(name, folder)
    export(pair.draft, folder / "deployed", target=pair.target)
    draw = np.random.default_rng(3)
    words = [draw.integers(FIRST_WORD, VOCAB, size=length).tolist() for length in (9, 14)]
    prompts = write_prompts(folder / "prompts.jsonl", words)
    return Target(name, FAMILIES[name], pair, folder / "deployed", prompts, folder, warm)


@pytest.fixture(scope="module", params=SERVED)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Target:
    return make(request.param, tmp_path_factory.mktemp(request.param), warm)


@pytest.fixture(scope="module")
def healthy(target: Target) -> Trace:
    return target.serve(target.deployed)


def test_the_static_check_passes_the_deployed_draft(target: Target) -> None:
    found = check(target.deployed, target=target.pair.target, reference=target.pair.draft)
    assert [one for one in found.findings if one.status in ("fail", "warn")] == []
    assert any(one.name == "target-class" and target.family.architecture in one.evidence for one in found.findings)


def test_a_healthy_pair_agrees_or_what_the_engine_feeds_instead_is_named(target: Target, healthy: Trace) -> None:
    result = target.diffed(healthy)
    assert result.coverage.matched == result.coverage.train_rows > 60
    if target.name in WITHOUT_RESIDUAL:
        expect(result, "features-without-residual", "target.hidden.0")
        assert result.diagnosis is not None
        (cause,) = result.diagnosis.confirmed
        assert f"{target.family.architecture} in SGLang 0.5.23" in str(cause.fix)
    else:
        expect(result, None, None)


def test_the_manifest_holds_what_the_loaded_target_was_told(target: Target, healthy: Trace) -> None:
    facts = healthy.manifest.target
    assert (facts["architecture"], facts["captures"]) == (target.family.architecture, True)
    assert facts["captured_inputs"] == list(IDS)


def test_one_layer_instead_of_three_is_named(target: Target) -> None:
    served = target.serve(target.single())
    assert served.manifest.target["captures"] is False
    result = target.diffed(served)
    expect(result, "single-layer-features", "fused")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert cause.fix == "set eagle_config.use_aux_hidden_state to true"


def test_a_target_class_that_forgets_to_capture_is_named_with_its_release(
    tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(ROOT / "tests/support/engine_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(never_captures.VARIABLE, "1")
    kimi = make("kimi_k25", tmp_path, warm)
    result = kimi.diffed(kimi.serve(kimi.deployed))
    expect(result, "single-layer-features", "fused")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert "KimiK25ForConditionalGeneration in SGLang 0.5.23 was never told to capture" in str(cause.fix)


def test_modules_of_sglang_that_cannot_be_imported_are_known(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang passes over a module without a word when an operator it looks up is absent, and then lacks its models."""
    with warm():
        failed = unimported_in(process.PYTHON)
    assert set(failed) == UNIMPORTED, failed
