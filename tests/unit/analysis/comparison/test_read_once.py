"""What a report costs to read: every row group of values once, and one alignment."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.reader import Trace, open_trace
from eagle_trace.valuereader import ValueReader
from eagle_trace_analysis import Alignment, diff
from eagle_trace_analysis.comparison.fold import Serial
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.report.html import render_html
from eagle_trace_analysis.report.json import to_json_text
from eagle_trace_analysis.report.text import render

GOLDEN = Path(__file__).parents[3] / "golden"
SERVERS = ("healthy", "broken")


def pair(serve: str) -> tuple[Trace, Trace]:
    return open_trace(GOLDEN / "train.trace"), open_trace(GOLDEN / f"{serve}.trace")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each row group of values was decoded."""
    found: Counter[Any] = Counter()
    original = ValueReader._group

    def counted(self: ValueReader, number: int) -> Any:
        if number not in self._cache:
            group = self.data.groups[number]
            found[group.part, group.index] += 1
        return original(self, number)

    monkeypatch.setattr(ValueReader, "_group", counted)
    return found


@pytest.fixture
def aligned(monkeypatch: pytest.MonkeyPatch) -> list[Alignment]:
    """The alignments that were made."""
    found: list[Alignment] = []
    original = Alignment.__init__

    def counted(self: Alignment, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Alignment, "__init__", counted)
    return found


@pytest.mark.parametrize("serve", SERVERS)
def test_a_report_reads_each_row_group_once_and_aligns_once(
    serve: str, read: Counter[Any], aligned: list[Alignment]
) -> None:
    train, other = pair(serve)
    result = diff(train, other, executor=Serial())
    assert set(read.values()) == {1}
    compared = sum(read.values())
    for page in (render_html(result, train=train, serve=other), render(result), to_json_text(result)):
        assert page
    assert (sum(read.values()), len(aligned)) == (compared, 1)


@pytest.mark.parametrize("serve", SERVERS)
def test_figures_that_were_kept_are_those_that_are_read_again(serve: str) -> None:
    result = diff(*pair(serve))
    kept, again = RowFigures.of(result), RowFigures(*pair(serve))
    assert kept is result.figures
    for step in again.steps():
        rows = again.rows(step)
        for site in again.train.sites:
            one, other = kept.site(site, rows), again.site(site, rows)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                for name in ("error", "train_norm", "serve_norm"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        one, other = kept.logits(rows), again.logits(rows)
        assert (one is None) == (other is None)
        np.testing.assert_array_equal(one, other)


def test_traces_given_in_place_of_those_that_were_compared_are_read(read: Counter[Any]) -> None:
    result = diff(*pair("healthy"))
    before = sum(read.values())
    figures = RowFigures.of(result, *pair("healthy"))
    assert figures is not result.figures
    assert figures.site("fc.out", figures.rows(0)) is not None
    assert sum(read.values()) > before
