"""Choosing sites and rows."""

from __future__ import annotations

import time

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


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"roots": "1," * 5000}, "at most 1000 ranges"),
        ({"steps": f"0:{2**31 + 1}"}, "such as 0:64"),
        ({"roots": "9" * 5000}, "such as 0:64"),
        ({"sites": ",".join(["fc.*"] * 101)}, "at most 100 patterns"),
        ({"sites": "*" * 101}, "at most 100 patterns"),
    ],
)
def test_a_selection_is_bounded(asked: dict[str, str], words: str):
    with pytest.raises(UsageError, match=words) as refused:
        Selection.parse(**asked)
    assert len(str(refused.value)) < 300


def test_ranges_that_overlap_touch_and_come_in_any_order_choose_what_each_of_them_does():
    random = np.random.default_rng(0)
    for _ in range(200):
        lows = random.integers(0, 60, size=int(random.integers(1, 9)))
        ranges = tuple(
            (int(low), None if random.random() < 0.1 else int(low) + int(random.integers(1, 20))) for low in lows
        )
        root = random.integers(0, 90, size=50)
        kept = Selection(roots=ranges).mask(Rows.build(
            prompt_id=[0] * 50, root=root.tolist(), step=[0] * 50, token_id=[1] * 50, position=[0] * 50, call_id=0,
            path=[()] * 50,
        ))  # fmt: skip
        inside = [any(low <= one < (high or 10**9) for low, high in ranges) for one in root.tolist()]
        assert kept.tolist() == inside, ranges


def test_a_selection_as_large_as_it_may_be_costs_a_forward_next_to_nothing():
    selection = Selection.parse(
        sites=",".join(f"fc.*{'*' * number}" for number in range(90)), roots=",".join(map(str, range(0, 2000, 2)))
    )
    many = rows()
    selection.mask(many), selection.wants("norm")
    began = time.thread_time()
    for _ in range(100):
        selection.mask(many)
        for _ in range(40):
            selection.wants("norm")
    assert time.thread_time() - began < 0.5, "a hundred forwards"
