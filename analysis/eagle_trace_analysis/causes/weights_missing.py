"""Parameters left at their random start, since nobody shipped them."""

from __future__ import annotations

from dataclasses import replace

from eagle_trace_analysis.causes.base import Cause, Outcome, clipped, confirmed, ruled_out, without_parameters
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.not_loaded import dropped_for, equal_words, not_loaded, shown, sites_of, state_words


def check(context: Context) -> Outcome:
    """Parameters that the server holds with other numbers than trained, and found under no name."""
    if (lacking := without_parameters(context)) is not None:
        return lacking
    trained, served = context.params
    lost = not_loaded(context)
    mine = [name for name in lost if dropped_for(context, name) is None]
    if not mine:
        common = [name for name in trained if name in served and not name.startswith("t2d")]
        found = sum(bool(served[name]["in_checkpoint"]) for name in common)
        return ruled_out(
            f"{equal_words(context)}, {found} found in the deployed checkpoint"
            + (f"; {clipped(lost)} dropped for the name" if lost else "")
        )
    seen = shown(context, mine)
    if seen is None:
        return ruled_out(f"{clipped(mine)} not loaded, but no site that uses them differs")
    site, name = seen
    evidence = (
        f"{len(mine)} of {len(trained)} parameters are not in the deployed checkpoint: {clipped(mine)} "
        f"({state_words(context, name)}); {site} differs"
    )
    fix = context.fix("weights-present", f"ship {clipped(mine)} (`eagle-trace export` does)")
    return replace(confirmed(evidence, fix, site), explains=sites_of(mine))


CAUSE = Cause(
    "weights-missing",
    "Accept length 1.00.",
    "Parameters as loaded held against the training's: not in the deployed checkpoint, other numbers than trained; "
    "the site that uses them differs.",
    "Ship the tensors.",
    ("logits",),
    check,
)
