"""The terminal report never loses information: what is cut is said in full above, and any pipe can hold it."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.reader import open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.report.text import print_diff, render
from tests.support.endings import ending_of
from tests.support.hostile import hostile_pair

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def broken() -> Diff:
    return diff(open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "broken.trace"))


@pytest.fixture(scope="module")
def healthy() -> Diff:
    return diff(open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / "healthy.trace"))


def test_the_second_line_of_an_agreement_is_whole(healthy: Diff) -> None:
    second = ending_of(render(healthy))[1]
    assert second.startswith("largest error: ")
    assert second.endswith("allowed)")
    assert len(second) <= 80


def test_a_line_that_is_cut_is_said_in_full_above(broken: Diff) -> None:
    words = ", ".join(f"[T, {width}] bfloat16" for width in range(1000, 1012))
    changed = tuple(
        replace(one, divergence=replace(one.divergence, train=dict(one.divergence.train) | {"text": words}))
        if one.frontier and one.divergence
        else one
        for one in broken.sites
    )
    text = render(replace(broken, sites=changed), verbose=False)
    second = ending_of(text)[1]
    assert second.endswith(" ...")
    assert len(second) <= 80
    assert words in " ".join(line.strip() for line in text.splitlines())


def test_the_first_line_fits_whatever_the_site_is_called(broken: Diff) -> None:
    first = next(one for one in broken.sites if one.frontier and one.divergence is not None)
    assert first.divergence is not None
    long = replace(first.divergence, site="layer.0.attn.residual", step=12, kind="presence")
    result = replace(broken, sites=(replace(first, site=long.site, step=12, divergence=long),))
    assert ending_of(render(result))[0] == "diverged: they part at layer.0.attn.residual, step 12 (presence)"


def test_an_agreeing_pair_needs_no_table_unless_asked(healthy: Diff) -> None:
    assert "layer.0.attn.k_rope" not in render(healthy)
    assert "sites: 31 agree at every step; diff --sites all lists them" in render(healthy)
    assert "layer.0.attn.k_rope" in render(healthy, sites="all")


def test_the_table_lists_what_diverged_and_counts_the_rest(broken: Diff) -> None:
    text = render(broken)
    rows = [line for line in text.splitlines() if line.endswith(("agree", "diverged", "diverged *"))]
    assert rows
    assert not [line for line in rows if line.endswith("agree")]
    assert "--sites all lists them" in text


def test_the_command_takes_sites() -> None:
    sides = [str(GOLDEN / "train.trace"), str(GOLDEN / "healthy.trace")]
    assert "layer.0.attn.k_rope" in CliRunner().invoke(app, ["diff", *sides, "--sites", "all"]).stdout


def test_a_plain_pipe_can_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, serve = (open_trace(path) for path in hostile_pair(tmp_path))
    result = replace(diff(train, serve), tolerance="größer als…")
    for encoding in ("ascii", "latin-1", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        print_diff(result)
        stream.flush()
        written = stream.buffer.getvalue()  # type: ignore[attr-defined]
        assert b"\x1b" not in written
        assert ending_of(written.decode(encoding))[0].startswith("diverged: ")


def test_a_diff_names_itself_in_a_line(broken: Diff, healthy: Diff) -> None:
    assert repr(broken).startswith("Diff(diverged at fused, step 0; ")
    assert repr(healthy).startswith("Diff(agree; ")
