"""Choosing sites and rows."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_trace.capture import Rows
from eagle_trace.errors import UsageError
from eagle_trace.selection import Selection, parse_ranges, select_prompts


def rows() -> Rows:
    return Rows.build(
        prompt_id=[0, 0, 1, 1],
        root=[0, 5, 5, 9],
        step=[0, 0, 1, 2],
        token_id=[1] * 4,
        position=[0] * 4,
        call_id=0,
        path=[(), (), (7,), (7, 8)],
    )


def test_an_empty_selection_keeps_everything():
    selection = Selection.parse()
    assert selection.wants("logits")
    assert selection.mask(rows()).all()
    assert selection.all_rows
    assert selection.to_dict() == {}


def test_sites_are_patterns():
    selection = Selection.parse(sites="fc.*, logits")
    assert [site for site in ("fc.in", "fc.out", "embed", "logits") if selection.wants(site)] == [
        "fc.in",
        "fc.out",
        "logits",
    ]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"roots": "5"}, [1, 2]),
        ({"roots": ":6"}, [0, 1, 2]),
        ({"roots": "0,9"}, [0, 3]),
        ({"steps": "1:"}, [2, 3]),
        ({"prompts": "1", "steps": "2"}, [3]),
    ],
)
def test_rows_are_chosen_by_ranges(asked: dict[str, str], kept: list[int]):
    assert np.flatnonzero(Selection.parse(**asked).mask(rows())).tolist() == kept


@pytest.mark.parametrize("text", ["a", "3:2", "2:2", "-1", "1:b"])
def test_what_is_no_range_is_refused_with_the_way_out(text: str):
    with pytest.raises(UsageError, match="such as 0:64"):
        parse_ranges(text)


def test_prompts_by_number():
    assert list(select_prompts(5, Selection.parse(prompts="1:3,4,9"))) == [1, 2, 4]
