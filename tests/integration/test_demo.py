"""The demo's Kimi-K2.5 pair on the real hosts: deployed right it agrees, fed one layer it is the story."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace import open_trace
from eagle_trace.demo.run import KIMI, diff_all, record_all
from eagle_trace_analysis import diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support.verdicts import expect
from tests.support.warm.start import Warm

pytest.importorskip("speculators")
GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def test_the_story_is_told_on_its_own_family(tmp_path: Path, warm: Warm) -> None:
    with warm():
        traces = record_all(tmp_path, lambda _: None, KIMI)
    healthy, broken = diff_all(traces)
    expect(healthy, None, None)
    expect(broken, "single-layer-features", "fused")
    right, wrong = healthy.accept_length.observed, broken.accept_length.observed
    assert right is not None
    assert wrong is not None
    assert right > 3 > 1.5 > wrong
    # the demo's other pair is another model
    for mine, theirs in ((traces.train, "healthy"), (traces.healthy, "healthy"), (traces.healthy, "train")):
        other = open_trace(GOLDEN / f"{theirs}.trace")
        found = diagnosed(diff(open_trace(mine), other), open_trace(mine), other)
        assert "these are two drafts" in str(found.incomparable) or "no prompt in common" in str(found.incomparable)
