"""Which rows of a packed training batch are data, and how they are keyed."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_trace_training.batches import Batch

#: three documents of 3, 4 and 1 rows, two rows of padding; ids as speculators numbers them, or not
IDS = [(0, 0, 0, 1, 1, 1, 1, 2, -1, -1), (7, 7, 7, 2, 2, 2, 2, 9, -1, -1)]


def batch(ids: tuple[int, ...] = IDS[0], mask: str | None = "0110110100") -> Batch:
    positions = [1, 2, 3, 1, 2, 3, 4, 1, 0, 0][: len(ids)]
    return Batch(
        np.arange(10, 10 + len(ids), dtype=np.int32),
        np.array(positions, dtype=np.int32),
        np.array(ids, dtype=np.int32),
        None if mask is None else np.array([sign == "1" for sign in mask]),
    )


@pytest.mark.parametrize("ids", IDS)
def test_documents_are_told_apart_and_padding_is_none(ids: tuple[int, ...]) -> None:
    found = batch(ids)
    assert [tokens.tolist() for tokens in found.documents] == [[10, 11, 12], [13, 14, 15, 16], [17]]
    assert found.root[:8].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_a_later_step_has_no_rows_that_are_fed_the_next_documents_tokens() -> None:
    found = batch()
    assert [found.index(step).tolist() for step in range(5)] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 3, 4, 5],
        [0, 3, 4],
        [3],
        [],
    ]


def test_rows_carry_what_was_fed() -> None:
    found = batch()
    rows = found.rows(2, found.index(2), prompt_ids=[20, 21, 22], call_id=9)
    assert rows.prompt_id.tolist() == [20, 21, 21]
    assert rows.root.tolist() == [0, 0, 1]
    assert rows.paths() == [(11, 12), (14, 15), (15, 16)]
    assert rows.token_id.tolist() == [12, 15, 16], "the last token of the path"
    assert rows.position.tolist() == [3, 3, 4], "training counts from 1"
    assert set(rows.call_id.tolist()) == {9}


def test_step_0_has_no_path_and_a_step_without_rows_is_empty() -> None:
    found = batch()
    assert found.rows(0, found.index(0), [0, 1, 2], 0).path.shape == (8, 0)
    assert len(found.rows(4, found.index(4), [0, 1, 2], 0)) == 0


def test_the_mask_of_a_step_is_that_of_the_token_it_predicts_for() -> None:
    found = batch()
    assert found.counted(1, found.index(1)).tolist() == [True, True, True, True, False]  # type: ignore[union-attr]
    assert batch(mask=None).counted(1, found.index(1)) is None


def test_rows_fed_another_documents_tokens_are_counted_where_the_loss_counts_them() -> None:
    # row 6, the last of its document, is fed the token of the third one at step 1, and that one counts
    assert [batch().leaking(step) for step in range(3)] == [0, 1, 2]
    assert batch(mask="0110110000").leaking(1) == 0


def test_a_document_in_two_pieces_is_one_prompt_without_rows_across_the_gap() -> None:
    found = batch((0, 0, 1, 0, 0), "11111")
    assert [tokens.tolist() for tokens in found.documents] == [[10, 11, 13, 14], [12]]
    assert found.index(1).tolist() == [0, 3]


def test_padding_alone_holds_nothing() -> None:
    found = batch((-1, -1), "00")
    assert found.documents == []
    assert found.index(0).tolist() == []


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        batch(mask="01")


def test_padded_documents_are_shifted_each_by_itself() -> None:
    ids = np.array([[0, 0, 0, -1], [1, 1, 1, 1]], dtype=np.int32)
    tokens = np.array([[11, 12, 13, 0], [21, 22, 23, 24]], dtype=np.int32)
    mask = np.array([[0, 1, 1, 0], [1, 1, 0, 1]], dtype=np.bool_)
    flat = Batch(tokens.ravel(), np.tile(np.arange(4, dtype=np.int32), 2), ids.ravel(), mask.ravel(), width=4)
    assert [one.tolist() for one in flat.documents] == [[11, 12, 13], [21, 22, 23, 24]]
    assert flat.index(1).tolist() == [0, 1, 4, 5, 6]
    assert flat.rows(1, flat.index(1), [5, 6], 0).token_id.tolist() == [12, 13, 22, 23, 24]
    # the last row of the first is fed padding, not the second one's first token
    assert flat.leaking(1) == 0
    packed = Batch(flat.input_ids, flat.positions, flat.document_ids, flat.loss_mask)
    assert packed.leaking(1) == 1
