"""What a comparison says of what it found, in words and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import Divergence
from eagle_trace_analysis.comparison.tolerance import Tolerance
from eagle_trace_analysis.pairing.pairs import Coverage, skipped_because
from eagle_trace_analysis.pairing.roles import Roles

LISTED = 6


_STATISTIC = {
    "rho_median": "median row error",
    "rho_max": "largest row error",
    "channel_median": "median channel error",
    "scale_median": "median scale of rows",
}


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def numeric_divergence(
    site: str, step: int, metrics: Metrics, tolerance: Tolerance, exceeded: Sequence[str]
) -> Divergence:
    """The divergence of a site by its numbers; non-finite elements come before sizes."""
    if metrics.nonfinite_train or metrics.nonfinite_serve:
        counts = f"{metrics.nonfinite_train} elements in training, {metrics.nonfinite_serve} in serving"
        return Divergence(site, step, "nonfinite", f"not finite: {counts}", {}, {})
    name = exceeded[0]
    value, allowed = getattr(metrics, name), tolerance.allowed[name]
    why = f"{_STATISTIC[name]} {value:.2e}, {allowed:.2e} allowed"
    if name == "scale_median":
        why = f"serve is {value:.4g} x train, {1 - allowed:.4g} to {1 + allowed:.4g} allowed"
    elif metrics.scale_median is not None and abs(metrics.scale_median - 1) > allowed:
        why += f"; serve is {metrics.scale_median:.4g} x train"
    return Divergence(site, step, "values", why, {}, {}, statistic=name, value=value, allowed=allowed)


def why_no_rows(coverage: Coverage, roles: Roles) -> str:
    if not coverage.train_rows or not coverage.serve_rows:
        return f"rows on the {'serve' if coverage.serve_rows else 'train'} side only"
    reasons = list(coverage.skipped_serve or coverage.skipped_train)
    if reasons and not coverage.unmatched_serve:
        return skipped_because(reasons[0], roles)
    return "both sides have rows, none in common"


def both(train: Sequence[Any], serve: Sequence[Any], what: str) -> str:
    def some(names: Sequence[Any]) -> str:
        listed = ", ".join(str(name) for name in names[:LISTED])
        return (listed or "none") + (f", ... ({len(names)})" if len(names) > LISTED else "")

    return f"{what} are [{some(train)}] in training and [{some(serve)}] in serving"


def extent(trace: Trace) -> list[str]:
    """What rows a trace has, in a few words."""
    rows = trace.rows
    if not len(rows):
        return []
    return [
        f"{len(rows)} rows, {len(np.unique(rows.prompt_id))} prompts, "
        f"roots {rows.root.min()} to {rows.root.max()}, "
        f"steps {rows.step.min()} to {rows.step.max()}"
    ]


def provenance(trace: Trace) -> dict[str, Any]:
    """What made a trace, as far as a report needs it."""
    manifest = trace.manifest
    names = (
        "side",
        "level",
        "host",
        "packages",
        "dtype",
        "device",
        "created",
        "prompts_digest",
        "changes",
        "warnings",
    )
    return {"path": str(trace.path), "sealed": trace.sealed} | {name: getattr(manifest, name) for name in names}
