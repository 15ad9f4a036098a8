"""x_0 of each document, which the shift before training's forward drops: looked up in the data it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_trace.capture import Array, Int32
from eagle_trace.errors import UsageError

#: what stands in prompts.parquet for a first token that is not known
UNKNOWN = -1
COLUMN = "input_ids"


class FirstTokens:
    """Finds a document by its other tokens.

    A document of the data fits if it goes on, behind its first token, with the tokens of the batch: to its end, or,
    where the pack cut it off, at least so far. If those that fit begin with different tokens, it stays unknown.

    Args:
        datasets: where batches come from: `datasets.Dataset` (column ``input_ids``) or what holds one as its `data`,
            an Arrow table, or a sequence of token id lists.
        default: first token of documents that are not found, None to leave it unknown.

    Raises:
        UsageError: one of `datasets` is none of these.
    """

    def __init__(self, datasets: Iterable[Any] = (), default: int | None = None) -> None:
        self._default = UNKNOWN if default is None else default
        self._chunks = [_Chunk(chunk) for dataset in datasets for chunk in _token_lists(dataset)]

    def find(self, tokens: Int32) -> int:
        """x_0 of the document that goes on with `tokens` (x_1, x_2, ...), or the default."""
        whole: set[int] = set()
        cut: set[int] = set()
        for chunk in self._chunks:
            for first, complete in chunk.fitting(tokens):
                (whole if complete else cut).add(first)
        found = whole or cut
        return found.pop() if len(found) == 1 else self._default


class _Chunk:
    """A run of documents, with the second token of each, by which most others are ruled out at once."""

    def __init__(self, lists: Any) -> None:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        self._tokens: Array = lists.values.to_numpy(zero_copy_only=False)
        starts, lengths = offsets[:-1], np.diff(offsets)
        usable = lengths >= 2
        self._starts, self._lengths = starts[usable], lengths[usable]
        self._second = self._tokens[self._starts + 1]

    def fitting(self, tokens: Int32) -> Iterator[tuple[int, bool]]:
        """First token of each document that goes on with `tokens`, and whether they are all of it."""
        if not len(tokens):
            return
        for at in np.flatnonzero((self._second == tokens[0]) & (self._lengths > len(tokens))):
            start, length = self._starts[at], self._lengths[at]
            if np.array_equal(self._tokens[start + 1 : start + 1 + len(tokens)], tokens):
                yield int(self._tokens[start]), bool(length == len(tokens) + 1)


def _token_lists(dataset: Any) -> list[Any]:
    """The token lists of a dataset as Arrow list arrays."""
    table = dataset
    for _ in range(2):
        # a trainer's dataset holds a Hugging Face one, which holds an Arrow table
        if hasattr(table, "column"):
            break
        table = getattr(table, "data", table)
    if hasattr(table, "column"):
        if COLUMN not in table.column_names:
            raise UsageError(f"the dataset has no column {COLUMN}, only {', '.join(table.column_names)}")
        return list(table.column(COLUMN).chunks)
    if not isinstance(dataset, Sequence) or isinstance(dataset, str):
        raise UsageError(
            f"cannot look up first tokens in a {type(dataset).__name__}: give a datasets.Dataset with {COLUMN}, "
            "an Arrow table, or a list of token id lists"
        )
    lists = [np.asarray(item[COLUMN] if isinstance(item, Mapping) else item) for item in dataset]
    return [pa.array(lists, type=pa.list_(pa.int64()))]
