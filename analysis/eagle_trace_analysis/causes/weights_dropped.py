"""Parameters whose names the engine's loader does not know, and drops without a word."""

from __future__ import annotations

from dataclasses import replace

from eagle_trace_analysis.causes.base import Cause, Outcome, clipped, confirmed, ruled_out, without_parameters
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.not_loaded import dropped_for, equal_words, not_loaded, shown, sites_of, state_words


def check(context: Context) -> Outcome:
    """Parameters that the server holds with other numbers than trained, and of which it dropped a stored tensor."""
    if (lacking := without_parameters(context)) is not None:
        return lacking
    trained = context.params[0]
    mine = {name: key for name in not_loaded(context) if (key := dropped_for(context, name)) is not None}
    if not mine:
        keys = context.serve.manifest.draft.get("dropped_keys", [])
        noun = "key" if len(keys) == 1 else "keys"
        return ruled_out(
            f"{equal_words(context)}, {len(keys)} {noun} dropped" + (f" ({clipped(keys)})" if keys else "")
        )
    seen = shown(context, list(mine))
    if seen is None:
        return ruled_out(f"{clipped(mine)} not loaded, but no site that uses them differs")
    site, name = seen
    key = mine[name]
    evidence = (
        f"{len(mine)} of {len(trained)} parameters were dropped on loading, first {key} ({name}; "
        f"{state_words(context, name)}); {site} differs"
    )
    fix = context.fix("weight-names", f"rename {key} to {name}")
    return replace(confirmed(evidence, fix, site), explains=sites_of(mine))


CAUSE = Cause(
    "weights-dropped",
    "Low accept length that hardly moves when other faults are fixed (0.20 becomes 0.21 after one rename).",
    "Parameters as loaded (params.parquet) held against the training's, with the keys the engine dropped; the site "
    "that uses the first of them differs.",
    "Rename the keys to what the engine loads (`eagle-trace check` lists both).",
    ("layer.0.hidden_norm", "layer.0.attn.q"),
    check,
)
