"""Rows are paired by (prompt_key, root, step, path), every row has one fate, and the counts add up."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_trace.capture import Rows
from eagle_trace_analysis import align, diff
from eagle_trace_analysis.pairing.align import match
from eagle_trace_analysis.pairing.keys import lookup
from eagle_trace_analysis.pairing.pairs import Coverage
from tests.support.synthetic import Prompt, Side, _prompt_record, make_prompts, write_trace


def rows(keys: list[tuple[int, int, tuple[int, ...]]], own: list[bool] | None = None) -> Rows:
    return Rows.build(
        prompt_id=[prompt for prompt, _, _ in keys],
        root=[root for _, root, _ in keys],
        step=[len(path) for _, _, path in keys],
        token_id=[path[-1] if path else 0 for _, _, path in keys],
        position=[root for _, root, _ in keys],
        call_id=0,
        path=[path for _, _, path in keys],
        own_path=own,
    )


def matched(train: Rows, serve: Rows) -> list[tuple[int, int]]:
    pairs = match(train, serve, train.prompt_id.astype(np.int64), serve.prompt_id.astype(np.int64))
    return list(zip(pairs.train.tolist(), pairs.serve.tolist(), strict=True))


def coverage(train: Rows, serve: Rows) -> Coverage:
    return match(train, serve, train.prompt_id.astype(np.int64), serve.prompt_id.astype(np.int64)).coverage()


def test_rows_pair_by_prompt_root_step_and_path_in_any_order() -> None:
    train = rows([(0, 1, ()), (0, 1, (7,)), (0, 1, (7, 8)), (1, 1, ())])
    serve = rows([(1, 1, ()), (0, 1, (7, 8)), (0, 1, (7,)), (0, 1, ())])
    assert matched(train, serve) == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_a_path_that_differs_anywhere_is_counted_apart() -> None:
    train, serve = rows([(0, 1, (7, 8)), (0, 2, (7,))]), rows([(0, 1, (9, 8)), (0, 3, (7,))])
    found = coverage(train, serve)
    assert found.matched == 0
    assert found.skipped_train == {"other-tokens": 1}
    assert found.skipped_serve == {"other-tokens": 1}
    assert (found.unmatched_train, found.unmatched_serve) == (1, 1)


def test_a_row_computed_twice_pairs_once() -> None:
    train, serve = rows([(0, 1, ())]), rows([(0, 1, ()), (0, 1, ())])
    assert matched(train, serve) == [(0, 0)]
    assert coverage(train, serve).skipped_serve == {"recomputed": 1}


def test_a_row_of_another_branch_is_skipped_on_both_sides() -> None:
    train, serve = rows([(0, 1, (7,))]), rows([(0, 1, (7,))], [False])
    found = coverage(train, serve)
    assert found.matched == 0
    assert found.skipped_train == found.skipped_serve == {"other-branch": 1}


def test_large_ids_are_packed_without_confusion() -> None:
    big = np.iinfo(np.int32).max
    keys = [(p, r, (t, u, v)) for p in (0, big) for r in (0, big) for t in (0, big) for u in (0, big) for v in (1, big)]
    train, serve = rows(keys), rows(keys[::-1])
    assert matched(train, serve) == [(i, len(keys) - 1 - i) for i in range(len(keys))]


KEY = st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 2), max_size=2).map(tuple))
SIDE = st.lists(st.tuples(KEY, st.booleans()), max_size=25)


@settings(max_examples=150, deadline=None)
@given(SIDE, SIDE)
def test_pairs_are_those_of_a_dictionary_and_the_counts_add_up(train: list, serve: list) -> None:
    sides = [rows([key for key, _ in side], [own for _, own in side]) for side in (train, serve)]
    firsts = []
    for side in (train, serve):
        first: dict = {}
        for at, (key, own) in enumerate(side):
            if own:
                first.setdefault(key, at)
        firsts.append(first)
    expected = sorted((at, firsts[1][key]) for key, at in firsts[0].items() if key in firsts[1])
    assert matched(*sides) == expected
    found = coverage(*sides)  # the constructor asserts that it adds up
    assert found.matched == len(expected)


def test_coverage_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        Coverage(
            train_rows=3,
            serve_rows=2,
            matched=2,
            unmatched_train=0,
            unmatched_serve=0,
            skipped_train={},
            skipped_serve={},
        )


def test_a_hundred_thousand_rows_align_in_well_under_a_second() -> None:
    rng = np.random.default_rng(0)
    count = 120_000
    step = rng.integers(0, 4, count).astype(np.int32)
    path = rng.integers(0, 160_000, (count, 3)).astype(np.int32)
    path[np.arange(3)[None, :] >= step[:, None]] = -1
    made = Rows.build(
        prompt_id=rng.integers(0, 200, count).astype(np.int32),
        root=np.arange(count, dtype=np.int32),
        step=step,
        token_id=step,
        position=step,
        call_id=0,
        path=path,
    )
    shuffled = made.take(rng.permutation(count))
    started = time.process_time()
    found = matched(made, shuffled)
    assert time.process_time() - started < 1.0
    assert len(found) == count


def test_lookup_finds_rows_of_the_same_side() -> None:
    among = rows([(0, 1, ()), (0, 2, (5,)), (0, 2, (6,))])
    assert lookup(rows([(0, 2, (6,)), (0, 9, ()), (0, 1, ())]), among).tolist() == [2, -1, 0]
    assert lookup(rows([(0, 2, (6,))]), rows([])).tolist() == [-1]


def test_prompts_pair_by_key_and_not_by_number(tmp_path: Path) -> None:
    prompts = make_prompts()
    train, serve = (
        write_trace(tmp_path / "t", Side("train"), prompts),
        write_trace(tmp_path / "s", Side("serve"), prompts),
    )
    pairs = align(train, serve).pairs("fc.out")
    assert len(pairs) == len(train.keys("fc.out"))
    assert (np.diff(pairs.train) > 0).all()
    assert np.array_equal(train.values("fc.out")[pairs.train], serve.values("fc.out")[pairs.serve])
    assert (pairs.train_keys.prompt_id[pairs.train] != pairs.serve_keys.prompt_id[pairs.serve]).any()


def test_every_site_adds_up_over_its_steps(tmp_path: Path) -> None:
    prompts = make_prompts(tree=True)
    train = write_trace(tmp_path / "t", Side("train"), prompts)
    serve = write_trace(tmp_path / "s", Side("serve", repeat=1), prompts)
    alignment = align(train, serve)
    for site in [*train.sites, "token", "topk.draft_id"]:
        pairs = alignment.pairs(site)
        whole, steps = pairs.coverage(), [pairs.coverage(step) for step in pairs.steps]
        assert whole.matched == len(pairs) == sum(part.matched for part in steps)
        assert whole.serve_rows == sum(part.serve_rows for part in steps)
        assert set(whole.skipped_serve) <= {"other-branch", "recomputed"}, site
    assert alignment.coverage.skipped_serve["other-branch"] == 12


def test_logits_that_the_server_never_computes_are_skipped_and_not_unmatched(tmp_path: Path) -> None:
    prompts = make_prompts()
    train, serve = (
        write_trace(tmp_path / "t", Side("train"), prompts),
        write_trace(tmp_path / "s", Side("serve"), prompts),
    )
    found = align(train, serve).pairs("logits").coverage()
    assert found.unmatched_train == found.unmatched_serve == 0
    assert found.skipped_train == {"not-materialised": sum(prompt.length - 1 for prompt in prompts)}
    silent = write_trace(tmp_path / "u", Side("serve", not_materialised=[]), prompts)
    assert align(train, silent).pairs("logits").coverage().unmatched_train > 0


def test_rows_beyond_the_tokens_that_training_was_given_are_skipped(tmp_path: Path) -> None:
    prompts = make_prompts()
    short = [replace(prompt, tokens=prompt.tokens[: prompt.length], chains=()) for prompt in prompts]
    train, serve = (
        write_trace(tmp_path / "t", Side("train"), short),
        write_trace(tmp_path / "s", Side("serve"), prompts),
    )
    found = align(train, serve).coverage
    assert found.unmatched_serve == 0
    assert found.share == 1.0
    assert found.skipped_serve["not-given"] == found.serve_rows - found.matched


def test_a_row_of_a_token_that_its_own_side_was_not_given_either_is_not_excused(tmp_path: Path) -> None:
    prompts = make_prompts()
    short = [replace(prompt, tokens=prompt.tokens[: prompt.length], chains=()) for prompt in prompts]
    train = write_trace(tmp_path / "t", Side("train"), short)
    with mock.patch("tests.support.synthetic._prompt_record", lambda number, one: _told(number, one, one.length)):
        serve = write_trace(tmp_path / "s", Side("serve"), prompts)
    found = align(train, serve).coverage
    assert "not-given" not in found.skipped_serve
    assert found.unmatched_serve == found.serve_rows - found.matched > 0


def _told(number: int, prompt: Prompt, tokens: int) -> dict[str, Any]:
    """The prompt's record with its first tokens alone."""
    return _prompt_record(number, replace(prompt, tokens=prompt.tokens[:tokens]))


@pytest.mark.parametrize("replayed", [True, False])
def test_what_a_replay_of_the_very_trace_lacks_is_counted_and_said(tmp_path: Path, replayed: bool) -> None:
    prompts = make_prompts()
    # training knows fewer tokens, and other chains below the same roots
    short = [
        replace(
            one,
            tokens=one.tokens[:-1],
            chains=tuple((root, ((path[0] + 1) % 80, *path[1:]), own) for root, path, own in one.chains[:2]),
        )
        for one in prompts
    ]
    serve = write_trace(tmp_path / "s", Side("serve"), prompts)
    settings = {"replayed": serve.manifest.recording if replayed else "2026-01-01T00:00:00+00:00 of others"}
    train = write_trace(tmp_path / "t", Side("train", settings=settings), short)
    result = diff(train, serve)
    found = result.coverage
    assert bool(found.skipped_serve) is not replayed
    assert (found.unmatched_serve == found.serve_rows - found.matched) is replayed
    assert ("replay-lacks" in [note.name for note in result.notes]) is replayed


def test_rows_behind_the_point_where_two_answers_part_are_skipped_and_no_divergence(tmp_path: Path) -> None:
    prompts = make_prompts()
    # the first answer token is another one: as when a rounding error flips the target's choice
    others = [
        replace(
            one, tokens=(*one.tokens[: one.length], (one.tokens[one.length] + 1) % 80, *one.tokens[one.length + 1 :])
        )
        for one in prompts
    ]
    train = write_trace(tmp_path / "t", Side("train"), others)
    serve = write_trace(tmp_path / "s", Side("serve"), prompts)
    result = diff(train, serve)
    assert result.verdict == "agree", result.first_divergence
    found = align(train, serve).coverage
    assert found.skipped_serve["answers-part"] == found.skipped_train["answers-part"] > 0
    assert found.unmatched_train == found.unmatched_serve == 0


def test_two_sides_without_rows_give_no_pairs() -> None:
    assert matched(rows([]), rows([])) == []
    assert matched(rows([(0, 1, ())]), rows([])) == []
    assert coverage(rows([]), rows([])).share == 0.0


@pytest.mark.parametrize(
    ("matched", "unmatched", "said"),
    [(805, 0, "100%"), (801, 4, "99%"), (9999, 1, "99%"), (769, 454, "63%"), (0, 0, "0%")],
)
def test_all_rows_are_said_of_all_rows_alone(matched: int, unmatched: int, said: str) -> None:
    coverage = Coverage(matched, matched + unmatched, matched, 0, unmatched, {}, {})
    assert coverage.per_cent == said
