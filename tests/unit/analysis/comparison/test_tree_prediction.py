"""The tree that a forward would draft, and how much of it is accepted: against a tree built in full, and by hand."""

from __future__ import annotations

from heapq import nlargest
from itertools import product
from math import log

import numpy as np
import pytest

from eagle_trace_analysis.comparison.tree import TreeShape, accepted_in_tree

VOCABULARY = 5
Rows = dict[tuple[int, tuple[int, ...]], list[tuple[int, float]]]


def forward(seed: int, depth: int) -> Rows:
    """Best ids of every node down to `depth`, of random probabilities."""
    rng = np.random.default_rng(seed)
    rows: Rows = {}
    for length in range(depth):
        for path in product(range(VOCABULARY), repeat=length):
            logprobs = np.log(rng.dirichlet(np.full(VOCABULARY, 0.4)))
            order = np.argsort(-logprobs)
            rows[0, path] = [(int(token), float(logprobs[token])) for token in order]
    return rows


def tree_of(rows: Rows, shape: TreeShape) -> set[tuple[int, ...]]:
    """The tree as a server drafts it, with every row known: written once more, over paths and sums."""
    scores: dict[tuple[int, ...], float] = {}
    expanded: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(shape.steps):
        below = {
            (*path, token): score + logprob
            for path, score in expanded.items()
            for token, logprob in rows[0, path][: shape.topk]
        }
        scores |= below
        expanded = {path: below[path] for path in nlargest(shape.topk, below, key=below.__getitem__)}
    return set(nlargest(shape.nodes, scores, key=scores.__getitem__))


SHAPES = [TreeShape(3, 2, 5), TreeShape(3, 4, 7), TreeShape(4, 3, 9), TreeShape(1, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_with_every_row_known_both_bounds_are_the_tree_built_in_full(shape: TreeShape) -> None:
    for seed in range(5):
        rows = forward(seed, shape.steps)
        tree = tree_of(rows, shape)
        for true in product(range(VOCABULARY), repeat=shape.steps):
            wanted = next((d for d in range(shape.steps) if true[: d + 1] not in tree), shape.steps)
            for compete in (True, False):
                assert accepted_in_tree(rows, true, 0, shape, unknown_compete=compete) == wanted


@pytest.mark.parametrize("shape", SHAPES)
def test_with_rows_along_the_true_path_alone_the_truth_lies_between_the_bounds(shape: TreeShape) -> None:
    apart = 0
    for seed in range(5):
        rows = forward(seed, shape.steps)
        tree = tree_of(rows, shape)
        for true in product(range(VOCABULARY), repeat=shape.steps):
            known = {(0, true[:d]): rows[0, true[:d]] for d in range(shape.steps)}
            wanted = next((d for d in range(shape.steps) if true[: d + 1] not in tree), shape.steps)
            least, most = (accepted_in_tree(known, true, 0, shape, unknown_compete=one) for one in (True, False))
            assert least <= wanted <= most
            apart += least < most
    assert apart or shape.steps == 1, "what is not known must show somewhere"


def test_a_token_beyond_the_width_or_the_verified_nodes_is_not_accepted() -> None:
    half = [(7, log(0.5)), (8, log(0.3)), (9, log(0.2))]
    rows: Rows = {(4, ()): half, (4, (7,)): half, (4, (8,)): half}
    shape = TreeShape(2, 2, 3)  # verified: 7 (0.5), 8 (0.3) and 7 7 (0.25); not 7 8 (0.15) nor 8 7 (0.15)
    accepted = {
        true: accepted_in_tree(rows, true, 4, shape, unknown_compete=True)
        for true in ((7, 7), (7, 8), (8, 7), (9, 7), (7,))
    }
    assert accepted == {(7, 7): 2, (7, 8): 1, (8, 7): 1, (9, 7): 0, (7,): 1}
