"""NaN and Inf."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, clipped, confirmed, ruled_out
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.not_loaded import not_loaded


def check(context: Context) -> Outcome:
    """Elements that are not finite, in parameters as loaded and at sites."""
    first = next((one for one in context.diff.frontier if one.kind == "nonfinite"), None)
    sides = zip(("training", "serving"), context.params, strict=True)
    bad = [
        f"{name} ({row['nonfinite']:,} in {side})"
        for side, rows in sides
        for name, row in rows.items()
        if row["nonfinite"]
    ]
    if first is None:
        metrics = [one.metrics for one in context.diff.sites if isinstance(one.metrics, Metrics)]
        text = f"every element of {len(metrics)} sites and steps is finite"
        return ruled_out(text + (f"; parameters that are not: {clipped(bad)}" if bad else ""))
    evidence = f"{first.site}, step {first.step}: {first.why}"
    lost = set(not_loaded(context))
    names = [name for name in context.params[1] if context.params[1][name]["nonfinite"]]
    if names and lost.issuperset(names):
        return ruled_out(f"{evidence}; the parameters with NaN were never loaded: {clipped(names)}")
    if bad:
        evidence += f"; as loaded, not finite: {clipped(bad)}"
        return confirmed(evidence, "export the checkpoint again after its weights were loaded or trained", first.site)
    return confirmed(
        evidence, "values overflow the dtype: serve in bfloat16 (float16 ends at 65,504), or in float32", first.site
    )


CAUSE = Cause(
    "nonfinite",
    "Accept length 1.00.",
    "Non-finite elements counted at every site and in every parameter as loaded; the first site with one.",
    "Load the weights that were never loaded; serve in a dtype that holds the values.",
    (),
    check,
)
