"""Drafts rejected in favour of the very same token."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context


def check(context: Context) -> Outcome:
    """Drafts rejected in favour of the very same token.

    No rule of verification does so: where a draft is rejected, the token in its place is drawn from what the target
    holds likelier than the draft does, of which the rejected one is none (arXiv:2211.17192, section 2.3), or is the
    target's own choice, to which the draft was compared.
    """
    columns = ["prompt_id", "round", "proposed", "accepted", "bonus", "parents"]
    rounds = context.serve.table("rounds").select(columns).to_pylist()
    # the last one of a request may have been cut where its answer ended
    last = {one["prompt_id"]: one["round"] for one in sorted(rounds, key=lambda one: int(one["round"]))}
    chains = [
        one
        for one in rounds
        if one["proposed"]
        and one["parents"] == list(range(len(one["proposed"])))
        and one["round"] != last[one["prompt_id"]]
    ]
    # of a round's first draft that was not accepted
    refused = [
        (one["proposed"][len(one["accepted"] or ())], one["bonus"])
        for one in chains
        if len(one["accepted"] or ()) < len(one["proposed"])
    ]
    if not chains:
        return not_tested("the serve trace holds no verify rounds of chains", "record the serve side with more rounds")
    again = sum(draft == bonus for draft, bonus in refused)
    if not again:
        return ruled_out(f"{len(refused)} of {len(chains)} rounds reject a draft, none for the same token")
    temperature = context.serve.manifest.settings.get("temperature")
    hot = f", at temperature {temperature:g}" if isinstance(temperature, int | float) else ""
    return confirmed(
        f"{again} of the {len(refused)} rounds that reject a draft commit that very token in its place{hot}: the draft "
        "is right, and its verification is not",
        "the server must accept a draft that its target chose: update it, report it, or serve at temperature 0, where "
        "drafts are compared with the target's choice",
        "accept length",
    )


CAUSE = Cause(
    "verify-rejects",
    "Accept length near 1 at a temperature above 0, and fine at 0; every tensor is as trained.",
    "The first draft that each round rejects against the token that was committed in its place.",
    "Update the server, or serve at temperature 0.",
    (),
    check,
    of_server=True,
)
