"""Accept length that the training-side forward predicts for a server that drafts trees (`comparison.tree`).

Every root where the server began a round, or (``walk``) every root at which the round before ended, has a number
accepted at least and at most. The length is 1 + their mean, the bonus token included, as observed lengths are counted;
between the two means lies what the training forward would get. At a temperature above 0 this holds in expectation:
SGLang's verification takes a child with exactly the target's probability of it, so a token that the server committed
is a child in the training side's tree as often as it would be accepted there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from eagle_trace.reader import Trace, padded_paths
from eagle_trace_analysis.comparison.result import AcceptLength
from eagle_trace_analysis.comparison.tree import Best, TreeShape, accepted_in_tree


@dataclass(frozen=True)
class Rounds:
    """What a server committed of one prompt: its tokens by position, and what was accepted by root."""

    tokens: Mapping[int, int]
    accepted: Mapping[int, int]


@dataclass(frozen=True)
class _Guess:
    """Accepted at a root at least and at most; `whole` if the answer does not end inside."""

    least: int
    most: int
    whole: bool


def tree_shape(serve: Trace) -> TreeShape | None:
    """The trees of a server; None if it drafts chains, or its trace does not say."""
    settings = serve.manifest.settings
    steps, topk, tokens = (settings.get(name) for name in ("steps", "topk", "draft_tokens"))
    if not (isinstance(steps, int) and isinstance(topk, int) and isinstance(tokens, int)):
        return None
    return TreeShape(steps, topk, tokens - 1) if steps > 0 and topk > 1 and tokens > 1 else None


def predict_tree(
    observed: AcceptLength, train: Trace, prompts: Mapping[str, Rounds], shape: TreeShape
) -> AcceptLength | None:
    """`observed` with what is predicted for these trees; None if too little is known."""
    best = best_of(train, shape.topk)
    guesses: dict[str, dict[int, _Guess]] = {}
    walks: list[list[_Guess]] | None = [[], []]
    for key, prompt in prompts.items():
        mine = best.get(key, {})
        found = {root: _guess(mine, prompt.tokens, root, shape) for root in prompt.accepted}
        guesses[key] = {root: one for root, one in found.items() if one is not None}
        for number, length in enumerate((lambda one: one.least, lambda one: one.most)):
            steps = _walk(mine, prompt, shape, length)
            if walks is not None and steps is not None:
                walks[number] += steps
            else:
                walks = None
    rounds = [one for by_root in guesses.values() for one in by_root.values()]
    wanted = sum(len(prompt.accepted) for prompt in prompts.values())
    if not rounds or 2 * len(rounds) < wanted:
        return None
    walked = walks is not None and all(walks)
    low, high = walks if walks is not None and walked else (rounds, rounds)
    least, most = [one.least for one in low], [one.most for one in high]
    better = worse = 0
    for key, by_root in guesses.items():
        for root, one in by_root.items():
            got = prompts[key].accepted[root]
            better += one.least > got
            worse += one.whole and one.most < got
    return replace(
        observed,
        predicted=1.0 + (float(np.mean(least)) + float(np.mean(most))) / 2,
        predicted_range=(1.0 + float(np.mean(least)), 1.0 + float(np.mean(most))),
        predicted_by_depth=_shares([*least, *most], shape.steps),
        predicted_rounds=len(low),
        predicted_basis="walk" if walked else "rounds",
        undecided=0 if walked else wanted - len(rounds),
        better=better,
        worse=worse,
    )


def best_of(train: Trace, width: int) -> dict[str, Best]:
    """The `width` best target ids of each row with their log-probabilities, by prompt key and (root, path)."""
    columns = ["prompt_id", "root", "step", "path", "rank", "target_id", "logprob"]
    table = train.table("topk").select(columns)
    table = table.take(np.flatnonzero(table.column("rank").to_numpy() < width))
    numbers = dict(zip(train.prompts["prompt_id"].tolist(), train.prompts["prompt_key"].tolist(), strict=True))
    found: dict[str, dict[tuple[int, tuple[int, ...]], list[tuple[int, float]]]] = {}
    if not table.num_rows:
        return {}
    paths = padded_paths(table.column("path"))
    ranks, ids, logprobs = (table.column(name).to_pylist() for name in ("rank", "target_id", "logprob"))
    prompt, roots, steps = (table.column(name).to_pylist() for name in ("prompt_id", "root", "step"))
    for at in np.argsort(table.column("rank").to_numpy(), kind="stable"):
        if prompt[at] in numbers:
            row = (roots[at], tuple(paths[at, : steps[at]].tolist()))
            known = found.setdefault(str(numbers[prompt[at]]), {}).setdefault(row, [])
            if len(known) == ranks[at]:  # a row that was recorded twice counts once
                known.append((ids[at], logprobs[at]))
    # a row of which fewer are known says nothing of the others
    return {key: {row: ids for row, ids in rows.items() if len(ids) == width} for key, rows in found.items()}


def _guess(best: Best, tokens: Mapping[int, int], root: int, shape: TreeShape) -> _Guess | None:
    """What is accepted at `root`; None if a row along the true tokens is missing that decides."""
    true: tuple[int, ...] = ()
    while len(true) < shape.steps and root + 2 + len(true) in tokens:
        true = (*true, tokens[root + 2 + len(true)])
    known = 0
    while known < len(true) and (root, true[:known]) in best:
        known += 1
    least, most = (
        accepted_in_tree(best, true[:known], root, shape, unknown_compete=compete) for compete in (True, False)
    )
    if known < len(true) and most == known:
        return None  # the next token might be in the tree as well
    return _Guess(least, most, len(true) == shape.steps)


def _walk(best: Best, prompt: Rounds, shape: TreeShape, length: Callable[[_Guess], int]) -> list[_Guess] | None:
    """Rounds from the first one on, each where the one before ended; None if what decides one is not known."""
    if not prompt.accepted:
        return None
    root, last, found = min(prompt.accepted), max(prompt.accepted), []
    while root <= last:
        guess = _guess(best, prompt.tokens, root, shape)
        if guess is None:
            return None
        if not guess.whole:
            break  # the answer ends inside this round
        found.append(guess)
        root += length(guess) + 1
    return found


def _shares(accepted: list[int], depth: int) -> tuple[float, ...]:
    """Share accepted at each depth of those that got there."""
    reached = [sum(one >= d - 1 for one in accepted) for d in range(1, depth + 1)]
    return tuple(sum(one >= d for one in accepted) / count for d, count in enumerate(reached, start=1) if count)
