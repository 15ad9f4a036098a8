"""What is fed to the draft: documents, one per sequence of tokens, packed along T or padded to [B, T].

Works on plain numbers, so that every case can be tested without a model. A training forward takes x_1, x_2,
... beside g_0, g_1, ..., and at step s feeds row i the token s places further on. So:

- the true tokens of a prompt, as one document, give step 0 of every root, and the steps whose tokens are the
  true ones;
- any other chain below a root gives a document of its own, x_1 .. x_{root+1} and then the chain: step s of
  row `root` feeds the chain's s-th token and attends to what a server's s-th draft step attends to.

Rows behind a chain's root have no target features. Attention is causal, so what they start from (zeros)
reaches no row that is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Int32, Rows

Index = NDArray[np.intp]
Chain = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Document:
    """One sequence the draft is run on.

    Attributes:
        prompt_id: the prompt it comes from.
        tokens: tokens fed at step 0, int32 [T]: row i is fed x_{i+1}.
        features: rows 0 .. features - 1 start from target features, the rows behind them from zeros.
        roots: for each step the rows to capture, int32, ascending.
        guesses: for each step the rows of which the best ids alone are kept: what training would draft along
            the true tokens, where the replayed server drafted something else.
    """

    prompt_id: int
    tokens: Int32
    features: int
    roots: tuple[Int32, ...]
    guesses: tuple[Int32, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def steps(self) -> int:
        """Number of forwards this document needs."""
        both = (*enumerate(self.roots), *enumerate(self.guesses))
        return max((step + 1 for step, roots in both if len(roots)), default=0)

    def path(self, root: int, step: int) -> tuple[int, ...]:
        """Tokens fed at steps 1 .. `step` of row `root`."""
        return tuple(self.tokens[root + 1 : root + 1 + step].tolist())


def teacher_forced(prompt_id: int, token_ids: Sequence[int], features: int, steps: int) -> Document:
    """A prompt on its own tokens: every root that has features, every step whose token exists.

    Args:
        prompt_id: the prompt.
        token_ids: x_0 .. x_{n-1}.
        features: number of roots, from 0, that have features.
        steps: number of forwards.
    """
    tokens = np.asarray(token_ids[1:], dtype=np.int32)
    features = min(features, len(tokens))
    roots = tuple(np.arange(max(0, min(features, len(tokens) - step)), dtype=np.int32) for step in range(steps))
    return Document(prompt_id, tokens, features, roots)


def replayed(
    prompt_id: int,
    token_ids: Sequence[int],
    features: int,
    chains: Iterable[Chain],
    *,
    guess_from: int | None = None,
    steps: int = 1,
) -> list[Document]:
    """The documents that hold step 0 of every root and every row (root, chain below it), each row in one of
    them.

    Args:
        prompt_id: the prompt.
        token_ids: x_0 .. x_{n-1}, the true tokens.
        features: number of roots, from 0, that have features; chains below later roots are left out.
        chains: (root, tokens fed at steps 1 .. s), one for every row of step s to capture.
        guess_from: first root of which to keep the best ids along the true tokens; None for none.
        steps: number of forwards of those.

    Returns:
        The document of the true tokens first, then one for every chain that is no beginning of another.
    """
    tokens = np.asarray(token_ids[1:], dtype=np.int32)
    features = min(features, len(tokens))
    true: dict[int, list[int]] = {0: list(range(features))}
    other: list[Chain] = []
    for root, path in sorted(set(chains)):
        if root >= features or not path:
            continue
        if tuple(tokens[root + 1 : root + 1 + len(path)].tolist()) == path:
            true.setdefault(len(path), []).append(root)
        else:
            other.append((root, path))
    guesses = _guesses(true, len(tokens), features, guess_from, steps)
    documents = [Document(prompt_id, tokens, features, _by_step(true), guesses)]
    branch: list[Chain] = []
    for chain, following in zip_longest(other, other[1:]):
        branch.append(chain)
        root, path = chain
        # sorted order puts a chain right before those that go on from it
        if following is not None and following[0] == root and following[1][: len(path)] == path:
            continue
        wanted = {len(part): [root] for _, part in branch}
        documents.append(
            Document(
                prompt_id,
                np.append(tokens[: root + 1], np.array(path, dtype=np.int32)),
                root + 1,
                _by_step(wanted),
            )
        )
        branch.clear()
    return documents


def _guesses(
    true: dict[int, list[int]], tokens: int, features: int, first: int | None, steps: int
) -> tuple[Int32, ...]:
    """For each step the roots from `first` on whose true tokens reach so far, without those captured anyway."""
    if first is None:
        return ()
    ends = [min(features, tokens - step) for step in range(steps)]
    return tuple(
        np.setdiff1d(np.arange(first, max(first, end)), true.get(step, [])).astype(np.int32)
        for step, end in enumerate(ends)
    )


def _by_step(roots: dict[int, list[int]]) -> tuple[Int32, ...]:
    return tuple(np.asarray(roots.get(step, []), dtype=np.int32) for step in range(max(roots) + 1))


@dataclass(frozen=True)
class Pack:
    """Documents that share one forward: side by side along T, or each padded on the right to the same width.

    Attributes:
        documents: the documents in order.
        starts: row at which each of them starts, [D].
        width: rows of each padded document, so that T is D * width; None where they are not padded.
    """

    documents: tuple[Document, ...]
    starts: tuple[int, ...]
    width: int | None = None

    def __len__(self) -> int:
        if self.width is not None:
            return self.width * len(self.documents)
        return self.starts[-1] + len(self.documents[-1])

    @property
    def steps(self) -> int:
        """Number of forwards the pack needs."""
        return max(document.steps for document in self.documents)

    @property
    def token_ids(self) -> Int32:
        """Tokens fed at step 0, 0 as padding; int32 [T]."""
        return self._spread([document.tokens for document in self.documents], padding=0)

    @property
    def document_ids(self) -> Int32:
        """Number of the document of each row, -1 for padding; int32 [T]."""
        numbers = [np.full(len(one), number, dtype=np.int32) for number, one in enumerate(self.documents)]
        return self._spread(numbers, padding=-1)

    @property
    def positions(self) -> Int32:
        """Position of each row in its own document: the row's root; int32 [T]."""
        return self._spread([np.arange(len(document), dtype=np.int32) for document in self.documents], padding=0)

    def _spread(self, parts: Sequence[Int32], padding: int) -> Int32:
        """One array per document, each at its start."""
        rows = np.full(len(self), padding, dtype=np.int32)
        for start, part in zip(self.starts, parts, strict=True):
            rows[start : start + len(part)] = part
        return rows

    def index(self, step: int, *, guesses: bool = False) -> Index:
        """Rows to capture at a step (or those of which the best ids alone are kept), as indices into T."""
        wanted = [document.guesses if guesses else document.roots for document in self.documents]
        return np.concatenate(
            [
                (roots[step] + start if step < len(roots) else np.empty(0)).astype(np.intp)
                for roots, start in zip(wanted, self.starts, strict=True)
            ]
        )

    def rows(self, step: int, call_id: int, *, guesses: bool = False) -> Rows:
        """Keys of the rows `index(step)`, with the token and position their document says they are fed."""
        keys = [
            (document, int(root))
            for document in self.documents
            for roots in [document.guesses if guesses else document.roots]
            if step < len(roots)
            for root in roots[step]
        ]
        return Rows.build(
            prompt_id=[document.prompt_id for document, _ in keys],
            root=[root for _, root in keys],
            step=[step] * len(keys),
            token_id=[int(document.tokens[root + step]) for document, root in keys],
            position=[root + step for _, root in keys],
            call_id=call_id,
            path=[document.path(root, step) for document, root in keys],
        )


def pack(documents: Iterable[Document], budget: int) -> Iterator[Pack]:
    """Documents in order, as many in a pack as fit `budget` rows; a longer one gets a pack of its own."""
    waiting: list[Document] = []
    rows = 0
    for document in documents:
        if not document.steps:
            continue
        if waiting and rows + len(document) > budget:
            yield _packed(waiting)
            waiting, rows = [], 0
        waiting.append(document)
        rows += len(document)
    if waiting:
        yield _packed(waiting)


def _packed(documents: Sequence[Document]) -> Pack:
    starts = np.cumsum([0, *(len(document) for document in documents[:-1])])
    return Pack(tuple(documents), tuple(starts.tolist()))


def pad(documents: Iterable[Document], budget: int) -> Iterator[Pack]:
    """Documents by length, so that little is padded, as many in a pack as fit `budget` rows."""
    waiting: list[Document] = []
    for document in sorted((one for one in documents if one.steps), key=len):
        if waiting and (len(waiting) + 1) * len(document) > budget:
            yield _padded(waiting)
            waiting = []
        waiting.append(document)
    if waiting:
        yield _padded(waiting)


def _padded(documents: Sequence[Document]) -> Pack:
    width = len(documents[-1])
    return Pack(tuple(documents), tuple(range(0, width * len(documents), width)), width)
