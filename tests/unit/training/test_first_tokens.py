"""First tokens, looked up in the data by what follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from eagle_trace.errors import UsageError
from eagle_trace_training.first_tokens import UNKNOWN, FirstTokens

DOCUMENTS = [[1, 2, 3], [9, 5, 6, 7], [8, 5, 6], [4, 2, 9], [3, 2, 9], [5]]


def find(tokens: list[int], *, default: int | None = None, data: Any = DOCUMENTS) -> int:
    return FirstTokens([data], default).find(np.array(tokens, dtype=np.int32))


def table(kind: pa.DataType) -> pa.Table:
    return pa.table({"input_ids": pa.array(DOCUMENTS, type=kind)})


class Wrapped:
    """As speculators' dataset holds a Hugging Face one, and that one a table."""

    def __init__(self, data: Any) -> None:
        self.data = data


@pytest.mark.parametrize(
    "data",
    [
        DOCUMENTS,
        [{"input_ids": np.array(ids)} for ids in DOCUMENTS],
        table(pa.list_(pa.int64())),
        table(pa.large_list(pa.int32())),
        pa.concat_tables([table(pa.list_(pa.int64())).slice(0, 1), table(pa.list_(pa.int64())).slice(1)]),
        Wrapped(Wrapped(table(pa.list_(pa.int64())))),
    ],
)
def test_every_kind_of_data_is_searched(data: Any) -> None:
    assert find([2, 3], data=data) == 1
    assert find([5, 6, 7], data=data) == 9
    assert find([3, 2], data=data) == UNKNOWN


def test_a_whole_document_is_preferred_to_one_that_goes_on() -> None:
    assert find([5, 6]) == 8


def test_a_document_cut_off_by_the_pack_is_found() -> None:
    assert find([5, 6, 7][:2], data=DOCUMENTS[:2]) == 9


def test_two_documents_that_differ_in_the_first_token_alone_leave_it_unknown() -> None:
    assert find([2, 9]) == UNKNOWN
    assert find([2, 9], default=77) == 77
    assert find([2, 9], data=[[4, 2, 9], [4, 2, 9]]) == 4


def test_a_document_of_one_token_has_nothing_to_be_found_by() -> None:
    assert find([], default=6) == 6


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(UsageError, match="no column input_ids, only text"):
        find([1], data=pa.table({"text": ["a"]}))
    with pytest.raises(UsageError, match="cannot look up first tokens in a int"):
        find([1], data=3)
