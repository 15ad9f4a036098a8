"""How far a draft tree that the training forward would build is accepted on the tokens that the server committed.

A server with `topk` > 1 drafts as EAGLE-2 does (SGLang's `select_top_k_tokens` and `organize_draft_results`): of the
best `topk` tokens below each of `topk` nodes, the `topk` with the largest product of probabilities are expanded next,
and of all tokens seen at any depth, the `draft_tokens - 1` with the largest product are verified. The answer goes on
along the true tokens for as long as they are among these, so at a root the number accepted is the number of leading
depths d at which the true path of length d is a node of the tree.

The training side has rows along the true tokens, and of what the server drafted the rows that training computes as
well. A node that would be expanded and has no row competes with children nobody knows: its i-th best child has at most
1/i of its probability, and at least none. So every root has a lower and an upper number, which are mostly equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import log

Path = tuple[int, ...]
#: by (root, path) of a row: its best target ids with their log-probabilities, best first
Best = Mapping[tuple[int, Path], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class TreeShape:
    """What a server's trees look like.

    Attributes:
        steps: draft steps, the depth of a tree at most.
        topk: nodes expanded at each depth, and children of each.
        nodes: tokens verified, without the root.
    """

    steps: int
    topk: int
    nodes: int


@dataclass(frozen=True)
class _Node:
    score: float
    #: None where nobody knows which token it is
    path: Path | None


def accepted_in_tree(best: Best, true: Path, root: int, shape: TreeShape, *, unknown_compete: bool) -> int:
    """Leading tokens of `true`, what follows the root, that are nodes of the tree drafted there.

    Args:
        best: rows along the true path (all of them) and whatever else is known.
        true: as many tokens as the tree is deep, or fewer where the answer ends.
        unknown_compete: whether children of a node without a row are as likely as they can be (a lower bound of what
            is accepted), or never chosen (an upper bound).
    """
    width = shape.topk
    level = [_Node(0.0, ())]
    seen: list[_Node] = []
    for _ in range(min(shape.steps, len(true))):
        children = [child for node in level for child in _children(best, node, root, width, unknown_compete)]
        seen += children
        level = nlargest(width, children, key=_score)
    kept = {node.path for node in nlargest(shape.nodes, seen, key=_score) if node.path is not None}
    accepted = 0
    while accepted < len(true) and true[: accepted + 1] in kept:
        accepted += 1
    return accepted


def _children(best: Best, node: _Node, root: int, width: int, unknown_compete: bool) -> list[_Node]:
    row = best.get((root, node.path)) if node.path is not None else None
    if row is not None:
        return [_Node(node.score + logprob, (*node.path, token)) for token, logprob in row[:width]]  # type: ignore[misc]
    if not unknown_compete:
        return []
    return [_Node(node.score - log(rank), None) for rank in range(1, width + 1)]


def _score(node: _Node) -> float:
    return node.score
