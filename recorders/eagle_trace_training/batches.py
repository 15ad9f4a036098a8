"""What a real training batch holds: documents packed or padded, the tokens each step feeds, which rows are data.

Works on plain numbers, so that every case can be tested without a model.

Training drops a document's first token, so row i of a document is fed x_{i+1} beside g_i and nothing in the batch says
what x_0 was. Each later step shifts the whole row of the batch by one: the last rows of a document are then fed the
next one's tokens (or padding). Training computes those rows too, but they are no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Array, Int32, Rows
from eagle_trace_training.documents import Index

#: document id of a row that only pads the batch; every other id is a document, as the model's attention mask has it
PADDING = -1


@dataclass(frozen=True)
class Batch:
    """One packed batch as the forward was given it.

    Attributes:
        input_ids: tokens fed at step 0, int32 [T].
        positions: rotary positions of step 0, int32 [T]; each later step adds one.
        document_ids: which document a row belongs to, int32 [T].
        loss_mask: which rows the loss of step 0 counts, bool [T]; None where training was given none.
        width: where documents are padded to [B, width] and T is B * width: a step shifts each of these rows by itself.
        first: the first token of each document, which training drops, int32 [D]; None where nothing says.
    """

    input_ids: Int32
    positions: Int32
    document_ids: Int32
    loss_mask: NDArray[np.bool_] | None = None
    width: int | None = None
    first: Int32 | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.input_ids), len(self.positions), len(self.document_ids)}
        if self.loss_mask is not None:
            lengths.add(len(self.loss_mask))
        if len(lengths) > 1:
            raise ValueError(f"tokens, positions, document ids and loss mask differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def number(self) -> Int32:
        """Number of each row's document in order of first appearance, -1 for padding; int32 [T]."""
        ids, first, inverse = np.unique(self.document_ids, return_index=True, return_inverse=True)
        wanted = np.flatnonzero(ids != PADDING)
        numbers = np.full(len(ids), -1, dtype=np.int32)
        numbers[wanted[np.argsort(first[wanted])]] = np.arange(len(wanted), dtype=np.int32)
        return numbers[inverse]

    @cached_property
    def root(self) -> Int32:
        """Place of each row in its document: the index of its target feature; int32 [T]."""
        order = np.argsort(self.number, kind="stable")
        ordered = self.number[order]
        place = np.empty(len(self), dtype=np.int32)
        place[order] = np.arange(len(self)) - np.searchsorted(ordered, ordered)
        return place

    @property
    def documents(self) -> list[Int32]:
        """The tokens of each document without its first one: x_1, x_2, ..."""
        return [self.input_ids[self.number == number] for number in range(int(self.number.max(initial=-1)) + 1)]

    def index(self, step: int) -> Index:
        """Rows that are data at a step: those whose token is their own document's; ascending indices into T."""
        here, there = slice(0, max(0, len(self) - step)), slice(step, None)
        own = (self.number[here] >= 0) & (self.number[here] == self.number[there])
        # a document in two pieces is one to the attention, but the token next to a row may be another document's
        return np.flatnonzero(own & (self.root[here] + step == self.root[there]))

    def rows(self, step: int, index: Index, prompt_ids: Sequence[int], call_id: int) -> Rows:
        """Keys of the rows at `index` (of those `index(step)` names), each as training feeds it.

        Args:
            step: the step.
            index: indices into T.
            prompt_ids: prompt of each document.
            call_id: the forward.
        """
        below = index[:, None] + np.arange(1, step + 1)
        return Rows.build(
            prompt_id=np.asarray(prompt_ids, dtype=np.int32)[self.number[index]] if len(index) else [],
            root=self.root[index],
            step=np.full(len(index), step),
            token_id=self.input_ids[index + step],
            position=self.positions[index] + step,
            call_id=call_id,
            path=self.input_ids[below],
        )

    def counted(self, step: int, index: Index) -> NDArray[np.bool_] | None:
        """Which of the rows the loss of `step` counts, bool [len(index)]; None if training was given no mask.

        The loss of step s pairs row i with the target and the mask of row i + s.
        """
        return None if self.loss_mask is None else self.loss_mask[index + step]

    def leaking(self, step: int) -> int:
        """How many rows that are no data the loss of `step` counts: fed tokens of another document."""
        if self.loss_mask is None or step == 0:
            return 0
        width = self.width or len(self)
        counted = np.zeros((len(self) // width, width), dtype=np.bool_)
        counted[:, : max(0, width - step)] = self.loss_mask.reshape(counted.shape)[:, step:]
        counted.reshape(-1)[self.index(step)] = False
        return int(counted.sum())


def padded(given: Mapping[str, Array], *, unshifted: Array | None = None) -> Batch:
    """A batch of a document per row, padded on the right to [B, T].

    The row of a document's last token is fed what the shift leaves (0), so it is no data.

    Args:
        given: ``input_ids`` and ``loss_mask`` [B, T] or [B, T, 1], and, where the forward was given them,
            ``attention_mask`` [B, T] and ``position_ids``, which count from 0 else.
        unshifted: the ids [B, T] before the shift that drops each document's first, if that was seen.
    """
    tokens = given["input_ids"].astype(np.int32)
    held = given["attention_mask"].astype(bool) if "attention_mask" in given else np.ones(tokens.shape, bool)
    positions = given.get("position_ids", np.arange(tokens.shape[1]))
    last = held.shape[1] - 1 - held[:, ::-1].argmax(axis=1)
    fed = held.copy()
    fed[np.arange(len(fed)), last] = False
    documents = np.where(fed, np.arange(len(fed))[:, None], PADDING)
    return Batch(
        tokens.reshape(-1),
        np.broadcast_to(positions, tokens.shape).reshape(-1).astype(np.int32),
        documents.reshape(-1).astype(np.int32),
        given["loss_mask"].reshape(-1).astype(np.bool_),
        width=tokens.shape[1],
        first=_first(unshifted, tokens, np.flatnonzero(fed.any(axis=1))),
    )


def _first(unshifted: Array | None, tokens: Array, documents: Array) -> Array | None:
    """x_0 of each document, if the shift before this forward was seen."""
    if unshifted is None or unshifted.shape != tokens.shape:
        return None
    ids = unshifted.astype(np.int32)
    return ids[documents, 0] if np.array_equal(ids[:, 1:], tokens[:, :-1]) else None
