"""Accept length as the server got it, from the verify rounds of a serve trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.result import AcceptLength

#: share of the accept length, and of the rounds, from which on a difference is none of rounding; and fewest rounds
GAP, FEWEST = 0.1, 3


def accept_length(serve: Trace) -> AcceptLength:
    """Tokens committed a verify round, the bonus token included: mean of ``len(accepted) + 1`` over rounds.

    `observed` is None if the trace holds no rounds. Shares by depth are conditional: of the rounds that
    proposed a token at depth d and accepted one at every depth above it.
    """
    prompts = serve.table("prompts")
    keys = dict(zip(prompts.column("prompt_id").to_pylist(), prompts.column("prompt_key").to_pylist(), strict=True))
    lengths: dict[str, list[int]] = defaultdict(list)
    reached: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    branches = 1
    columns = ["prompt_id", "proposed", "parents", "accepted", "bonus"]
    for row in serve.table("rounds").select(columns).to_pylist():
        count = len(row["accepted"] or [])
        branches = max(branches, max(Counter(p for p in row["parents"] or () if p >= 0).values(), default=1))
        bonus = 0 if row["bonus"] is None or row["bonus"] < 0 else 1
        lengths[str(keys.get(row["prompt_id"], row["prompt_id"]))].append(count + bonus)
        for depth in range(1, max(count, _deepest(row["proposed"] or [], row["parents"] or [])) + 1):
            if count >= depth - 1:
                reached[depth] += 1
                accepted[depth] += count >= depth
    rounds = sum(len(values) for values in lengths.values())
    if not rounds:
        return AcceptLength(None)
    return AcceptLength(
        observed=sum(sum(values) for values in lengths.values()) / rounds,
        rounds=rounds,
        by_depth=tuple(accepted[depth] / reached[depth] for depth in sorted(reached)),
        by_prompt={key: sum(values) / len(values) for key, values in lengths.items()},
        branches=branches,
    )


def contradiction(accept: AcceptLength) -> str | None:
    """What is wrong with two traces that agree at every site and whose accept lengths do not; None if nothing is.

    Where all sites agree, the server drafts what training drafts, so both have the same tokens accepted. Rounding
    may flip a best id now and then, hence a tenth of the length and of the rounds is let pass.
    """
    if not accept.comparable or accept.observed is None or accept.predicted is None:
        return None
    low, high = accept.predicted_range or (accept.predicted, accept.predicted)
    gap = max(low - accept.observed, accept.observed - high, 0.0)
    unlike = accept.better + accept.worse
    if gap <= GAP * accept.observed or unlike < max(FEWEST, GAP * accept.rounds):
        return None
    return (
        f"nothing that was compared differs, yet the server got an accept length of {accept.observed:.2f} where the "
        f"training forward gets {accept.predicted:.2f} on the same tokens ({unlike} of {accept.rounds} rounds "
        "differ): something that was not compared does not agree"
    )


def _deepest(proposed: Sequence[int], parents: Sequence[int]) -> int:
    """Depth of a draft tree: node 0 is the root, node i + 1 is ``proposed[i]`` with parent node
    ``parents[i]``.
    """
    if len(parents) != len(proposed):
        return len(proposed)
    depth = [0]
    for node, parent in enumerate(parents, start=1):
        # a parent that does not come before its child is no tree in order: an unlinked node (-1) is never
        # accepted
        depth.append(depth[parent] + 1 if 0 <= parent < node else 0)
    return max(depth)
