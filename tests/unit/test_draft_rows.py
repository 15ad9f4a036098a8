"""Which rows of SGLang's draft calls are data, and how their keys come about."""

import numpy as np
import pytest

from eagle_trace_sglang.draft_rows import DraftCall, RowTracker, tree_parents


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
        mode="EXTEND",
        rids=rids,
        input_ids=positions + 100,
        positions=positions,
        seq_lens=ints(*(start + n for n in lengths)),
        extend_lens=ints(*lengths),
    )


def decode(rids: list[str], tokens: list[int], positions: list[int], seq_lens: list[int]) -> DraftCall:
    return DraftCall("DECODE", rids, ints(*tokens), ints(*positions), ints(*seq_lens))


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
        "DRAFT_EXTEND_V2",
        ["a", "b"],
        ints(11, 12, 0, 0, 21, 0, 0, 0),
        ints(5, 6, 7, 8, 9, 10, 11, 12),
        ints(9, 13),
        extend_lens=ints(4, 4),
        accept_lens=ints(2, 1),
    )
    tracker = tracking({"a": 0, "b": 1})
    tracker.close_round("a")
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


def test_a_draft_step_out_of_order_is_an_error_and_no_guess() -> None:
    tracker = tracking({"a": 0})
    with pytest.raises(ValueError, match="does not follow"):
        tracker.rows(decode(["a"], [5], [12], [11]), 0)


def test_a_tree_step_without_the_choice_of_branches_is_an_error() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(decode(["a"], [1, 2], [11, 11], [11]), 0)
    with pytest.raises(ValueError, match="choice of branches"):
        tracker.rows(decode(["a"], [3, 4], [12, 12], [11]), 1)


def test_committed_tokens_go_past_the_answer() -> None:
    tracker = tracking({"a": 0})
    tracker.rows(prefill(["a"], [3]), 0)  # feeds x1, x2 and the sampled x3
    call = DraftCall("DRAFT_EXTEND_V2", ["a"], ints(7, 8, 0, 0), ints(3, 4, 5, 6), ints(7), ints(4), ints(2))
    tracker.rows(call, 1)
    assert tracker.committed("a", [99, 100, 101]) == [99, 100, 101, 102, 7, 8]


def test_tree_parents_undoes_child_and_sibling_links() -> None:
    # node 0 has children 1 and 2, node 1 has child 3
    assert tree_parents(ints(1, 3, -1, -1), ints(-1, 2, -1, -1)) == [-1, 0, 0, 1]
