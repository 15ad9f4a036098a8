"""Accept length that the training-side forward predicts on the tokens that the server committed.

A greedy chain of drafts is accepted as far as it equals what the target says. What the target says is known: it is
what the server committed. So at a root p the predicted number of accepted tokens is the number of leading depths
d = 1, 2, ... at which the best id (after d2t) of the training side's row (p, step d - 1, path = the true tokens
below p) is the true token x_{p + 1 + d}. Nothing of what the server drafted enters.

- ``walk``: from each prompt's first round on, every round starts where the one before ended (root + accepted + 1),
  as a server of this draft would go. Needs the rows along the true tokens at every root, which
  `record --mode train --replay` keeps (best ids alone where the server drafted something else).
- ``rounds``: at the roots of the server's own rounds. Taken where some rows along the true tokens are missing; a
  round is undecided from the depth on whose row is missing.

Either way the length is 1 + the mean number of accepted tokens, the bonus token included, as observed ones are
counted; with undecided rounds it is 1 + the sum over depths of the product of the conditional shares.

At a temperature above 0 the same holds in expectation: SGLang accepts a drafted token with exactly the probability that
the target gives it, and a token that the server committed equals a guess with that probability, too. Of a server that
drafts trees, what such a tree would get is predicted (`comparison.tree_prediction`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from eagle_trace.reader import Trace, padded_paths
from eagle_trace_analysis.comparison.result import AcceptLength
from eagle_trace_analysis.comparison.tree_prediction import Rounds, predict_tree, tree_shape

Chain = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Prompt:
    """What the server committed of one prompt, and the roots of its rounds with what was accepted there."""

    tokens: dict[int, int]
    rounds: dict[int, int]


@dataclass(frozen=True)
class _Guess:
    """Outcome at one root: tokens accepted, and up to which depth that is known. In a tree at least and `most`."""

    accepted: int
    decided: int
    most: int | None = None


def predict(observed: AcceptLength, train: Trace, serve: Trace) -> AcceptLength:
    """`observed` with what the training side predicts beside it; unchanged if nothing can be said.

    Args:
        observed: what the server got.
        train, serve: the traces.
    """
    prompts, depth = _served(serve)
    if observed.branches > 1 and (shape := tree_shape(serve)) is not None:
        committed = {key: Rounds(one.tokens, one.rounds) for key, one in prompts.items() if one.rounds}
        if (predicted := predict_tree(observed, train, committed, shape)) is not None:
            return predicted
    best = _best_ids(train, {key: min(one.rounds) for key, one in prompts.items() if one.rounds})
    guesses: dict[str, dict[int, _Guess]] = {}
    walked: list[_Guess] | None = []
    for key, prompt in prompts.items():
        mine = best.get(key)
        if not mine or not prompt.rounds:
            walked = None
            continue
        guesses[key] = {root: _guess(mine, prompt.tokens, root, depth) for root in prompt.rounds}
        steps = _walk(mine, prompt, depth)
        walked = None if walked is None or steps is None else [*walked, *steps]
    rounds = [guess for by_root in guesses.values() for guess in by_root.values()]
    used = walked or rounds
    shares, decided = _shares(used, depth)
    if not shares:
        return observed
    better = worse = 0
    for key, by_root in guesses.items():
        for root, guess in by_root.items():
            got = prompts[key].rounds[root]
            better += guess.accepted > got
            # a round whose next depth is not known might still catch up
            worse += guess.accepted < got and guess.decided > guess.accepted
    return replace(
        observed,
        predicted=1.0 + float(np.sum(np.cumprod(shares))),
        predicted_by_depth=tuple(shares),
        predicted_rounds=len(used),
        predicted_basis="walk" if walked else "rounds",
        undecided=len(used) - decided,
        better=better,
        worse=worse,
    )


def _served(serve: Trace) -> tuple[dict[str, _Prompt], int]:
    """Tokens committed and rounds of each prompt by its key, and the largest depth proposed."""
    keys: dict[int, str] = {}
    found: dict[str, _Prompt] = {}
    for row in serve.table("prompts").select(["prompt_id", "prompt_key", "token_ids"]).to_pylist():
        keys[row["prompt_id"]] = str(row["prompt_key"])
        found[str(row["prompt_key"])] = _Prompt(dict(enumerate(row["token_ids"] or [])), {})
    steps = int(serve.rows.step.max(initial=0)) + 1
    depth = 0
    for row in serve.table("rounds").to_pylist():
        prompt = found.get(keys.get(row["prompt_id"], ""))
        if prompt is None:
            continue
        accepted = list(row["accepted"] or [])
        ends = [] if row["bonus"] is None or row["bonus"] < 0 else [row["bonus"]]
        for at, token in enumerate([*accepted, *ends]):
            prompt.tokens.setdefault(row["root"] + 2 + at, token)
        prompt.rounds.setdefault(row["root"], len(accepted))
        depth = max(depth, len(accepted), min(steps, len(row["proposed"] or [])))
    return found, depth


def _best_ids(train: Trace, first: Mapping[str, int]) -> dict[str, dict[Chain, int]]:
    """Best target id of each row of the training side, by prompt key and (root, path), from a first root on."""
    table = train.table("topk").select(["prompt_id", "root", "step", "path", "rank", "target_id"])
    numbers = {
        int(number): str(key)
        for number, key in zip(train.prompts["prompt_id"], train.prompts["prompt_key"], strict=True)
    }
    if not numbers:
        return {}
    ids = np.array(sorted(numbers), dtype=np.int64)
    start = np.array([first.get(numbers[number], np.iinfo(np.int64).max) for number in ids.tolist()], dtype=np.int64)
    prompt, root, rank = (table.column(name).to_numpy() for name in ("prompt_id", "root", "rank"))
    place = np.minimum(np.searchsorted(ids, prompt), len(ids) - 1)
    # an interrupted recording may have best ids of prompts that it does not name
    table = table.take(np.flatnonzero((rank == 0) & (ids[place] == prompt) & (root >= start[place])))
    found: dict[str, dict[Chain, int]] = {}
    if not table.num_rows:
        return found
    paths = padded_paths(table.column("path"))
    columns = (table.column(name).to_pylist() for name in ("prompt_id", "root", "step", "target_id"))
    for at, (number, row, step, target) in enumerate(zip(*columns, strict=True)):
        path = tuple(paths[at, :step].tolist())
        found.setdefault(numbers[number], {}).setdefault((row, path), target)
    return found


def _guess(best: Mapping[Chain, int], tokens: Mapping[int, int], root: int, depth: int) -> _Guess:
    path: tuple[int, ...] = ()
    for at in range(depth):
        true, guessed = tokens.get(root + 2 + at), best.get((root, path))
        if true is None or guessed is None:
            return _Guess(at, at)
        if guessed != true:
            return _Guess(at, depth)
        path = (*path, true)
    return _Guess(depth, depth)


def _walk(best: Mapping[Chain, int], prompt: _Prompt, depth: int) -> list[_Guess] | None:
    """Rounds from the first one on, each where the one before ended; None if a row on the way is missing."""
    root, last, found = min(prompt.rounds), max(prompt.rounds), []
    while root <= last:
        guess = _guess(best, prompt.tokens, root, depth)
        if guess.decided < depth:
            if root + 2 + guess.decided in prompt.tokens:
                return None
            # the tokens end inside this round
            break
        found.append(guess)
        root += guess.accepted + 1
    return found


def _shares(guesses: Iterable[_Guess], depth: int) -> tuple[list[float], int]:
    """Share accepted at each depth of those that got there, and how many guesses are decided at every depth."""
    reached, accepted, decided = np.zeros(depth), np.zeros(depth), 0
    for guess in guesses:
        # the depths it was accepted at, and the one it failed at if that is known
        reached[: min(guess.decided, guess.accepted + 1)] += 1
        accepted[: guess.accepted] += 1
        decided += guess.decided == depth
    known = int((reached > 0).sum())
    return [float(a / b) for a, b in zip(accepted[:known], reached[:known], strict=True)], decided
