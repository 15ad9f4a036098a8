"""Positions beyond the deployed max_position_embeddings."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Recomputed
from eagle_trace_analysis.trainers.speculators import DECODER


def check(context: Context) -> Outcome:
    """Positions beyond the deployed max_position_embeddings."""
    longest = int(context.serve.rows.position.max(initial=0))
    # a server may have loaded what the trainer wrote
    limit = context.served.get(DECODER, context.served).get("max_position_embeddings")
    if limit is None:
        return not_tested("the serve trace names no max_position_embeddings", "give --serve-draft")
    if longest < int(limit):
        return ruled_out(f"the largest position served is {longest}, the deployed limit {int(limit):,}")
    replay = context.replay
    if replay is None:
        return not_tested(
            f"positions up to {longest} pass the deployed limit {limit}; {context.no_replay}", RECORD_VALUES
        )
    inside: list[float] = []
    outside: list[float] = []
    allowed = 0.0
    for site in context.layer_sites("attn.q_rope", "attn.k_rope"):
        allowed = max(allowed, replay.allowed(site)["rho_max"])
        for step in replay.recorded.steps:
            found = replay.recompute(site, step)
            if isinstance(found, Recomputed):
                rho = found.row_errors
                beyond = replay.recorded.keys.position[found.rows] >= int(limit)
                inside += rho[~beyond].tolist()
                outside += rho[beyond].tolist()
    if not outside:
        return not_tested(f"no row past the deployed limit {limit} could be recomputed", RECORD_VALUES)
    worst_in, worst_out = max(inside, default=0.0), max(outside)
    figures = (
        f"rotation up to position {int(limit) - 1}: error {worst_in:.1e}; from {limit} on ({len(outside)} rows): "
        f"{worst_out:.1e}; {allowed:.1e} allowed"
    )
    if worst_in <= allowed < worst_out:
        return confirmed(figures, context.fix("max-position", "raise max_position_embeddings"), "layer.0.attn.q_rope")
    return ruled_out(figures)


CAUSE = Cause(
    "max-position",
    "Fine on short requests, collapses past a length.",
    "The rotation recomputed row by row: right below the deployed max_position_embeddings, wrong from it on.",
    "Raise max_position_embeddings to the target's.",
    ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
    check,
    of_server=True,
)
