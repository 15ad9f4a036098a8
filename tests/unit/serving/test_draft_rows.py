"""Which rows of SGLang's draft calls are data, and how their keys come about."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eagle_trace_serving.draft_rows import NO_BRANCHES, OTHER_LENGTHS, DraftCall, RowTracker, tree_parents


def tracking(prompts: dict[str, int]) -> RowTracker:
    tracker = RowTracker()
    for rid, prompt_id in prompts.items():
        tracker.admit(rid, prompt_id)
    return tracker


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def prefill(rids: list[str], lengths: list[int], start: int = 0) -> DraftCall:
    positions = np.concatenate([np.arange(start, start + n) for n in lengths])
    return DraftCall(
        kind="extend",
        rids=rids,
        input_ids=positions + 100,
        positions=positions,
        seq_lens=ints(*(start + n for n in lengths)),
        extend_lens=ints(*lengths),
    )


def decode(rids: list[str], tokens: list[int], positions: list[int], seq_lens: list[int]) -> DraftCall:
    return DraftCall("step", rids, ints(*tokens), ints(*positions), ints(*seq_lens))


def test_prefill_rows_start_at_their_own_position_and_feed_the_next_token() -> None:
    rows, index = tracking({"a": 7}).rows(prefill(["a"], [3]), call_id=5)
    assert rows.root.tolist() == [0, 1, 2]
    assert rows.token_id.tolist() == [100, 101, 102]
    assert rows.step.tolist() == [0, 0, 0]
    assert rows.prompt_id.tolist() == [7, 7, 7]
    assert rows.call_id.tolist() == [5, 5, 5]
    assert index.tolist() == [0, 1, 2]


def test_rows_of_requests_that_are_not_recorded_are_left_out() -> None:
    rows, index = tracking({"b": 1}).rows(prefill(["warm-up", "b"], [2, 3]), 0)
    assert index.tolist() == [2, 3, 4]
    assert rows.root.tolist() == [0, 1, 2]


def test_a_second_chunk_of_a_prompt_goes_on_where_the_first_ended() -> None:
    rows, _ = tracking({"a": 0}).rows(prefill(["a"], [2], start=64), 0)
    assert rows.root.tolist() == [64, 65]


def test_only_accepted_rows_of_the_extend_after_verify_are_data() -> None:
    call = DraftCall(
        "extend",
        ["a", "b"],
        ints(11, 12, 0, 0, 21, 0, 0, 0),
        ints(5, 6, 7, 8, 9, 10, 11, 12),
        ints(9, 13),
        extend_lens=ints(4, 4),
        accept_lens=ints(2, 1),
    )
    tracker = tracking({"a": 0, "b": 1})
    tracker.close_round("a", 4, [10, 11, 12])
    rows, index = tracker.rows(call, 0)
    assert index.tolist() == [0, 1, 4]
    assert rows.root.tolist() == [5, 6, 9]
    assert rows.token_id.tolist() == [11, 12, 21]
    assert rows.round.tolist() == [1, 1, 0]


def test_a_chain_knows_its_root_its_step_and_its_path() -> None:
    tracker = tracking({"a": 0, "b": 1})
    tracker.rows(decode(["a", "b"], [31, 41], [11, 21], [11, 21]), 0)
    rows, _ = tracker.rows(decode(["a", "b"], [32, 42], [12, 22], [11, 21]), 1)
    assert rows.root.tolist() == [10, 20]
    assert rows.step.tolist() == [2, 2]
    assert rows.paths() == [(31, 32), (41, 42)]
    assert rows.round.tolist() == [1, 1]
    assert rows.own_path.all()


def test_a_tree_row_follows_its_parent_and_says_when_it_sits_in_another_branch() -> None:
    tracker = tracking({"a": 0})
    tracker.select_branches(None)
    tracker.rows(decode(["a"], [1, 2], [11, 11], [11]), 0)
    tracker.select_branches(np.array([[0, 0]]))  # both rows of step 2 descend from branch 0
    rows, _ = tracker.rows(decode(["a"], [3, 4], [12, 12], [11]), 1)
    assert rows.paths() == [(1, 3), (1, 4)]
    assert rows.own_path.tolist() == [True, False]


def test_a_tree_step_without_the_choice_of_branches_is_left_out_and_counted() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(decode(["a"], [1, 2], [11, 11], [11]), 0)
    for step in (2, 3):
        rows, index = tracker.rows(decode(["a"], [3, 4], [12, 12], [11]), 1)
        assert (len(rows), len(index)) == (0, 0), step
    assert tracker.warnings == [f"4 draft rows were left out: {NO_BRANCHES}"]


def test_a_choice_of_branches_that_there_are_not_is_left_out_and_counted() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(decode(["a"], [1, 2], [11, 11], [11]), 0)
    tracker.select_branches(np.array([[0, 7]]))
    assert not len(tracker.rows(decode(["a"], [3, 4], [12, 12], [11]), 1)[0])
    assert tracker.left_out[NO_BRANCHES] == 2


def test_a_path_is_what_was_drafted_and_the_token_what_was_fed() -> None:
    tracker = tracking({"a": 0})
    tracker.select_branches(None, ints(31))
    rows, _ = tracker.rows(decode(["a"], [99], [11], [11]), 0)
    assert (rows.paths(), rows.token_id.tolist()) == ([(31,)], [99])


def test_lengths_that_a_forward_has_otherwise_than_the_round_are_noted_and_not_believed() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(prefill(["a"], [5]), 0)
    tracker.close_round("a", 4, [1, 2, 3])
    call = DraftCall("extend", ["a"], ints(2, 3, 0, 0), ints(5, 6, 7, 8), ints(11), ints(4), ints(1))
    rows, _ = tracker.rows(call, 1)
    assert rows.root.tolist() == [5, 6]
    assert tracker.rows(decode(["a"], [8], [7], [9]), 2)[0].root.tolist() == [6]
    assert tracker.warnings == [f"{OTHER_LENGTHS} (2 times)"]


def test_committed_tokens_go_past_the_answer_and_are_those_of_the_target() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(prefill(["a"], [3]), 0)  # feeds x1, x2 and the sampled x3
    prompt = [99, 100, 101]
    assert tracker.committed("a", prompt, []) == [*prompt, 102], "nothing but what was fed says what came next"
    tracker.close_round("a", 2, [55, 7, 8])
    call = DraftCall("extend", ["a"], ints(1, 2, 0, 0), ints(3, 4, 5, 6), ints(7), ints(4), ints(2))
    tracker.rows(call, 1)
    assert tracker.committed("a", prompt, []) == [*prompt, 55, 7, 8]
    assert tracker.committed("a", prompt, [55, 7]) == [*prompt, 55, 7, 8]


# ---- what the engine may have wrong --------------------------------------------------------------------------------


def a_session(topk: int, rng: np.random.Generator) -> Iterator[tuple[DraftCall, Callable[[RowTracker], object]]]:
    """Calls of two requests and a stranger, with what the tracker is told before each of them."""
    rids, lengths = ["a", "stranger", "b"], np.array([7, 4, 9])

    def nothing(_: RowTracker) -> None: ...

    # the prompts come in two chunks
    first = lengths // 2
    for done, upto in ((0 * lengths, first), (first, lengths)):
        yield extend(rids, done, upto - done), nothing
    for _ in range(3):
        for step in range(1, 4):
            parents = rng.integers(0, topk, (3, topk)) if topk > 1 and step > 1 else None
            drafted = rng.integers(0, 1000, 3 * topk)
            call = DraftCall("step", rids, drafted, np.repeat(lengths + step - 1, topk), lengths)
            yield call, lambda tracker, parents=parents, drafted=drafted: tracker.select_branches(parents, drafted)
        accepted = rng.integers(1, 4, 3)

        def verified(tracker: RowTracker, before: np.ndarray = lengths, accepted: np.ndarray = accepted) -> None:
            for rid, length, count in zip(rids, before, accepted, strict=True):
                if rid in tracker:
                    tracker.close_round(rid, int(length) - 1, list(range(int(count) + 1)))

        yield extend(rids, lengths, np.full(3, 4), accepted), verified
        lengths = lengths + accepted


def extend(rids: list[str], done: np.ndarray, rows: np.ndarray, accepted: Any = None) -> DraftCall:
    positions = np.concatenate([np.arange(start, start + n) for start, n in zip(done, rows, strict=True)])
    return DraftCall("extend", rids, positions + 100, positions, done + rows, rows, accepted)


def wrong(call: DraftCall, rng: np.random.Generator) -> DraftCall:
    """The same call with positions and tokens of any kind."""
    huge = np.iinfo(np.int64)
    kinds = [
        lambda x: x + 1,
        lambda x: -x,
        lambda x: x[::-1],
        lambda x: np.full_like(x, rng.choice([huge.min, -1, 0, 1 << 31, huge.max])),
        lambda x: rng.integers(huge.min, huge.max, len(x)),
    ]
    positions = kinds[rng.integers(len(kinds))](call.positions)
    if rng.random() < 0.2:
        positions = positions[: rng.integers(len(positions) + 1)]
    return replace(call, positions=positions, input_ids=kinds[rng.integers(len(kinds))](call.input_ids))


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_no_positions_and_no_tokens_change_the_key_of_a_row(topk: int, seed: int) -> None:
    right, odd = tracking({"a": 0, "b": 1}), tracking({"a": 0, "b": 1})
    fed = np.random.default_rng(seed + 1000)
    for number, (call, tell) in enumerate(a_session(topk, np.random.default_rng(seed))):
        for tracker in (right, odd):
            tell(tracker)
        expected, at = right.rows(call, number)
        found, index = odd.rows(wrong(call, fed), number)
        np.testing.assert_array_equal(index, at)
        for name in ("prompt_id", "root", "step", "round", "call_id", "path", "own_path"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        assert right.warnings == odd.warnings == []
    assert right.committed("a", [1], [2]) == odd.committed("a", [1], [2])


@pytest.mark.parametrize("seed", range(40))
def test_no_bookkeeping_of_a_forward_ends_a_recording(seed: int) -> None:
    """Lengths, accepted counts and branches of any kind: rows may be left out, and no key comes twice."""
    tracker, rng = tracking({"a": 0, "b": 1}), np.random.default_rng(seed)
    seen: set[tuple[object, ...]] = set()
    for number, (call, tell) in enumerate(a_session(2, rng)):
        tell(tracker)
        if rng.random() < 0.3:
            tracker.select_branches(rng.integers(-3, 9, (2, 2)))
        given = {name: getattr(call, name) for name in ("seq_lens", "extend_lens", "accept_lens")}
        odd = {name: value + rng.integers(-9, 9, 3) for name, value in given.items() if value is not None}
        rows, index = tracker.rows(replace(wrong(call, rng), **odd), number)
        assert (rows.root >= 0).all()
        assert ((index >= 0) & (index < len(call.input_ids))).all()
        keys = [key for key in zip(rows.prompt_id.tolist(), rows.root.tolist(), strict=True) if call.kind != "step"]
        assert not seen.intersection(keys)
        seen.update(keys)


def test_tree_parents_undoes_child_and_sibling_links() -> None:
    # node 0 has children 1 and 2, node 1 has child 3
    assert tree_parents(ints(1, 3, -1, -1), ints(-1, 2, -1, -1)) == [-1, 0, 0, 1]
