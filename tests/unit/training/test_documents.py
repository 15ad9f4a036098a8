"""What is fed to the draft: every wanted row lies in exactly one document, and feeds what it is to feed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_trace_training.documents import Chain, Document, Pack, pack, pad, replayed, teacher_forced

TOKENS = (10, 11, 12, 13, 14, 15)


def fed(document: Document, row: int, step: int) -> int | None:
    """Speculators' own shift: step s feeds row i the token s places further on."""
    return int(document.tokens[row + step]) if row + step < len(document) else None


def rows_of(documents: list[Document]) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (int(root), document.path(int(root), step))
        for document in documents
        for step, roots in enumerate(document.roots)
        for root in roots
    ]


def test_step_0_of_row_i_feeds_the_token_after_its_feature() -> None:
    document = teacher_forced(4, TOKENS, features=5, steps=1)
    assert document.prompt_id == 4
    assert document.tokens.tolist() == [11, 12, 13, 14, 15]
    assert document.roots[0].tolist() == [0, 1, 2, 3, 4]


def test_teacher_forced_steps_end_where_the_prompt_ends() -> None:
    document = teacher_forced(0, TOKENS, features=5, steps=4)
    assert [roots.tolist() for roots in document.roots] == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert document.path(1, 3) == (13, 14, 15)
    assert document.steps == 4


def test_roots_without_features_are_fed_and_not_captured() -> None:
    document = teacher_forced(0, TOKENS, features=2, steps=3)
    assert len(document) == 5
    assert [roots.tolist() for roots in document.roots] == [[0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize("token_ids", [(), (7,)])
def test_a_prompt_without_a_next_token_has_no_rows(token_ids: tuple[int, ...]) -> None:
    document = teacher_forced(0, token_ids, features=0, steps=3)
    assert document.steps == 0
    assert list(pack([document], 100)) == []


def test_a_chain_of_true_tokens_needs_no_document_of_its_own() -> None:
    documents = replayed(0, TOKENS, 5, [(1, (13,)), (1, (13, 14)), (2, (14,))])
    assert len(documents) == 1
    assert [roots.tolist() for roots in documents[0].roots] == [[0, 1, 2, 3, 4], [1, 2], [1]]


def test_a_guessed_chain_is_appended_to_the_tokens_up_to_its_root() -> None:
    _, chain = replayed(0, TOKENS, 5, [(2, (90,)), (2, (90, 91))])
    assert chain.tokens.tolist() == [11, 12, 13, 90, 91]
    assert chain.features == 3
    assert [roots.tolist() for roots in chain.roots] == [[], [2], [2]]
    assert [fed(chain, 2, step) for step in (1, 2)] == [90, 91]


def test_a_chain_that_leaves_the_true_tokens_late_is_captured_in_two_documents() -> None:
    true, chain = replayed(0, TOKENS, 5, [(1, (13,)), (1, (13, 90))])
    assert true.roots[1].tolist() == [1]
    assert [roots.tolist() for roots in chain.roots] == [[], [], [1]]


def test_a_shared_beginning_of_two_branches_is_captured_once() -> None:
    documents = replayed(0, TOKENS, 5, [(2, (90,)), (2, (90, 91)), (2, (90, 92)), (2, (93,))])
    assert len(documents) == 4
    assert sorted(rows_of(documents[1:])) == [(2, (90,)), (2, (90, 91)), (2, (90, 92)), (2, (93,))]


def test_only_the_rows_asked_for_are_captured() -> None:
    _, chain = replayed(0, TOKENS, 5, [(2, (90, 91, 92))])
    assert [roots.tolist() for roots in chain.roots] == [[], [], [], [2]]


def test_a_chain_below_the_last_root_reaches_past_the_committed_tokens() -> None:
    _, chain = replayed(0, TOKENS, 5, [(4, (90,))])
    assert chain.tokens.tolist() == [11, 12, 13, 14, 15, 90]


def test_chains_below_roots_without_features_are_left_out() -> None:
    assert len(replayed(0, TOKENS, 2, [(3, (90,))])) == 1


paths = st.lists(st.integers(11, 15), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 4), paths), max_size=12))
def test_every_wanted_row_lies_in_exactly_one_document_and_feeds_its_path(chains: set[Chain]) -> None:
    documents = replayed(0, TOKENS, 5, chains)
    assert sorted(rows_of(documents)) == sorted([*((root, ()) for root in range(5)), *chains])
    for document in documents:
        for step, roots in enumerate(document.roots):
            for root in roots.tolist():
                assert [fed(document, root, s) for s in range(1, step + 1)] == list(document.path(root, step))
                # up to its root, a chain's document is the true one
                assert document.tokens[: root + 1].tolist() == list(TOKENS[1 : root + 2])


def test_a_pack_lays_documents_side_by_side() -> None:
    first, second = teacher_forced(0, TOKENS[:4], 3, 2), teacher_forced(1, TOKENS[:3], 2, 2)
    (both,) = pack([first, second], budget=100)
    assert both.starts == (0, 3)
    assert both.token_ids.tolist() == [11, 12, 13, 11, 12]
    assert both.document_ids.tolist() == [0, 0, 0, 1, 1]
    assert both.positions.tolist() == [0, 1, 2, 0, 1]
    assert both.index(0).tolist() == [0, 1, 2, 3, 4]
    assert both.index(1).tolist() == [0, 1, 3]


def test_rows_of_a_pack_say_what_is_fed_where() -> None:
    documents = replayed(3, TOKENS, 5, [(2, (90,)), (2, (90, 91))])
    (both,) = pack(documents, budget=100)
    rows = both.rows(2, call_id=8)
    assert rows.prompt_id.tolist() == [3]
    assert rows.root.tolist() == [2]
    assert rows.token_id.tolist() == [91]
    assert rows.position.tolist() == [4]
    assert rows.paths() == [(90, 91)]
    assert rows.call_id.tolist() == [8]
    assert both.token_ids[both.index(2) + 2].tolist() == [91]


@pytest.mark.parametrize(("budget", "lengths"), [(100, [9]), (6, [6, 3]), (5, [3, 3, 3]), (1, [3, 3, 3])])
def test_packs_keep_to_the_budget_unless_one_document_is_longer(budget: int, lengths: list[int]) -> None:
    documents = [teacher_forced(n, TOKENS[:4], 3, 2) for n in range(3)]
    packs = list(pack(documents, budget))
    assert [len(each) for each in packs] == lengths
    assert [document for each in packs for document in each.documents] == documents


def test_a_pack_needs_as_many_forwards_as_its_deepest_row() -> None:
    documents = replayed(0, TOKENS, 5, [(0, (90, 91, 92))])
    assert [each.steps for each in pack(documents, 5)] == [1, 4]


def test_a_step_without_rows_has_keys_of_length_zero() -> None:
    (only,) = pack(replayed(0, TOKENS, 5, []), 100)
    assert isinstance(only, Pack)
    assert len(only.rows(3, 0)) == 0
    assert only.index(3).dtype == np.intp


def test_guesses_are_the_true_tokens_rows_that_nobody_captures() -> None:
    chains = [(2, (14,)), (2, (14, 99)), (3, (98,))]
    documents = replayed(0, TOKENS, 5, chains, guess_from=2, steps=3)
    guesses = [roots.tolist() for roots in documents[0].guesses]
    # at step 1 root 2 is captured anyway (its chain starts with the true token), and root 4 has no true token left
    assert guesses == [[], [3], [2]]
    assert documents[0].steps == 3
    assert all(not document.guesses for document in documents[1:])
    (packed,) = pack(documents, budget=100)
    rows = packed.rows(1, 0, guesses=True)
    assert (rows.root.tolist(), rows.token_id.tolist(), rows.paths()) == ([3], [15], [(15,)])
    assert packed.index(1, guesses=True).tolist() == [3]


def test_no_guesses_without_a_root_to_start_from() -> None:
    assert replayed(0, TOKENS, 5, [(2, (14,))])[0].guesses == ()


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_padded_documents_hold_the_same_rows_as_packed_ones(budget: int) -> None:
    documents = replayed(0, TOKENS, 5, [(0, (90, 91, 92)), (2, (14, 99)), (4, (93,))], guess_from=1, steps=3)
    padded = list(pad(documents, budget))
    assert sorted(len(one) for each in padded for one in each.documents) == sorted(len(one) for one in documents)
    assert all(len(each) <= budget for each in padded if len(each.documents) > 1)

    def rows(packs: list[Pack]) -> set[tuple[int, ...]]:
        found = set()
        for each in packs:
            assert each.width is None or len(each) == each.width * len(each.documents)
            assert (each.document_ids < 0).sum() == len(each) - sum(len(one) for one in each.documents)
            for step in range(each.steps):
                for guesses in (False, True):
                    keys, index = each.rows(step, 0, guesses=guesses), each.index(step, guesses=guesses)
                    # step s feeds row i the token s places on in its own row of the batch
                    assert each.token_ids[index + step].tolist() == keys.token_id.tolist()
                    assert each.positions[index].tolist() == keys.root.tolist()
                    found |= {
                        (step, guesses, *row) for row in zip(keys.root.tolist(), keys.token_id.tolist(), strict=True)
                    }
        return found

    assert rows(padded) == rows(list(pack(documents, 1000)))
