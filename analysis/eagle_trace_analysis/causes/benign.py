"""What looks like a fault and is none."""

from __future__ import annotations

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context


def check_rounding(context: Context) -> Outcome:
    """Kernels that round differently with batch and dtype."""
    notes = [note.text for note in context.diff.benign if note.name in ("rounding", "tie-flips")]
    return ruled_out("; ".join(notes) if notes else "no site differs by rounding alone")


def check_offset(context: Context) -> Outcome:
    """Positions that differ by a constant."""
    shifted = next((note.text for note in context.diff.benign if note.name == "position-offset"), None)
    if shifted is not None:
        same = [one for one in context.results("layer.0.attn.context") if one.verdict == "agree"]
        return ruled_out(f"{shifted}" + (f"; attention's output agrees at {len(same)} steps" if same else ""))
    found = context.divergence("position")
    if found is not None:
        return ruled_out(f"positions differ, and not by a constant: {found.why}")
    if not context.results("position"):
        return not_tested("no rows in common", "record both sides on the same prompts (--replay)")
    rows = len(context.serve.rows)
    return ruled_out(f"positions are equal ({rows:,} rows served)")


def check_metric(context: Context) -> Outcome:
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


def check_verified(context: Context) -> Outcome:
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


CAUSES = (
    Cause(
        "batch-variance",
        "Nothing: numbers differ in the last digits with batch and dtype.",
        "Never confirmed: what is within tolerance is called rounding, with its size.",
        "Nothing to fix.",
        (),
        check_rounding,
    ),
    Cause(
        "position-offset",
        "Nothing under RoPE: positions differ by a constant.",
        "Never confirmed: the constant is named, and attention's output agrees.",
        "Nothing to fix.",
        (),
        check_offset,
    ),
    Cause(
        "metric",
        "Accept length lower than in the paper.",
        "The server's own figure against the mean over its verify rounds, with and without the bonus token.",
        "Compare like with like.",
        (),
        check_metric,
    ),
    Cause(
        "verify-rejects",
        "Accept length near 1 at a temperature above 0, and fine at 0; every tensor is as trained.",
        "The first draft that each round rejects against the token that was committed in its place.",
        "Update the server, or serve at temperature 0.",
        (),
        check_verified,
        of_server=True,
    ),
)
