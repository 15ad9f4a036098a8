"""Accept length as the server got it, from the verify rounds of a serve trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from eagle_trace.reader import Trace
from eagle_trace_analysis.result import AcceptLength


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
    columns = ["prompt_id", "proposed", "parents", "accepted", "bonus"]
    for row in serve.table("rounds").select(columns).to_pylist():
        count = len(row["accepted"] or [])
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
