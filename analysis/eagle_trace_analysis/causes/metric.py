"""Accept length counted with or without the bonus token: no fault."""

from __future__ import annotations

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context


def check(context: Context) -> Outcome:
    """Accept length counted with or without the bonus token."""
    observed = context.diff.accept_length.observed
    if observed is None:
        return not_tested("the serve trace holds no verify rounds", "record the serve side until it has answered")
    counts = context.serve.manifest.settings.get("server_counts") or {}
    pairs = [
        (one.get("spec_accept_length"), one.get("spec_verify_ct")) for one in counts.values() if isinstance(one, dict)
    ]
    known = [(float(length), float(rounds)) for length, rounds in pairs if length is not None and rounds]
    own = f"{observed:.2f} tokens per round with the bonus token, {observed - 1:.2f} without"
    if not known:
        return ruled_out(f"{own}; the server reported no figure of its own")
    server = float(np.average([length for length, _ in known], weights=[rounds for _, rounds in known]))
    if abs(server - observed) <= 0.05 * observed:
        return ruled_out(f"{own}; the server's own figure is {server:.2f}, with the bonus token")
    if abs(server - (observed - 1)) <= 0.05 * observed:
        evidence = f"{own}; the server's own figure is {server:.2f}: it leaves the bonus token out"
        return confirmed(evidence, "compare like with like: add 1 to the server's figure", "accept length")
    return ruled_out(f"{own}; the server's own figure is {server:.2f}")


CAUSE = Cause(
    "metric",
    "Accept length lower than in the paper.",
    "The server's own figure against the mean over its verify rounds, with and without the bonus token.",
    "Compare like with like.",
    (),
    check,
)
