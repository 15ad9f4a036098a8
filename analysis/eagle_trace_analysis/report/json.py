"""A diff as JSON (docs/diff-json.md says what each key means)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eagle_trace_analysis.pairs import Coverage
from eagle_trace_analysis.result import Diff, Divergence, SiteResult

FORMAT_VERSION = 1


def to_json(diff: Diff) -> dict[str, Any]:
    """The whole result as plain data that strict JSON can hold.

    A number that is not finite becomes the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``; null stands
    for what is not known or was not measured.
    """
    first = diff.first_divergence
    data = {
        "format_version": FORMAT_VERSION,
        "verdict": diff.verdict,
        "exit_status": diff.exit_status,
        "reason": diff.incomparable,
        "level": diff.level,
        "first_divergence": _divergence(first) if first else None,
        "frontier": [_divergence(one) for one in diff.frontier],
        "coverage": _coverage(diff.coverage) | {"minimum_share": diff.minimum_share},
        "captures": _coverage(diff.captures),
        "accept_length": {
            "observed": diff.accept_length.observed,
            "rounds": diff.accept_length.rounds,
            "by_depth": list(diff.accept_length.by_depth),
            "by_prompt": dict(diff.accept_length.by_prompt),
        },
        "benign": [asdict(note) for note in diff.benign],
        "notes": [asdict(note) for note in diff.notes],
        "tolerance": diff.tolerance,
        "sites": [_site(result) for result in diff.sites],
        "traces": {side: dict(facts) for side, facts in diff.traces.items()},
    }
    return _strict(data)  # type: ignore[no-any-return]


def to_json_text(diff: Diff) -> str:
    """`to_json` as text, ending in a newline."""
    return json.dumps(to_json(diff), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _divergence(one: Divergence) -> dict[str, Any]:
    row = one.row
    return {
        "site": one.site,
        "step": one.step,
        "kind": one.kind,
        "why": one.why,
        "prompt_id": one.prompt_id,
        "serve_prompt_id": row.serve_prompt_id if row else None,
        "prompt_key": one.prompt_key,
        "root": one.root,
        "path": list(row.path) if row else None,
        "statistic": one.statistic,
        "value": one.value,
        "allowed": one.allowed,
        "train": dict(one.train),
        "serve": dict(one.serve),
    }


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "matched": coverage.matched,
        "share": coverage.share,
        "rows": {"train": coverage.train_rows, "serve": coverage.serve_rows},
        "unmatched": {"train": coverage.unmatched_train, "serve": coverage.unmatched_serve},
        "skipped": {"train": dict(coverage.skipped_train), "serve": dict(coverage.skipped_serve)},
    }


def _site(result: SiteResult) -> dict[str, Any]:
    tolerance = result.tolerance
    return {
        "site": result.site,
        "step": result.step,
        "verdict": result.verdict,
        "frontier": result.frontier,
        "kind": result.divergence.kind if result.divergence else None,
        "why": result.divergence.why if result.divergence else result.reason,
        "coverage": _coverage(result.coverage) if result.coverage else None,
        "metrics": {k: v for k, v in asdict(result.metrics).items() if v is not None}
        if result.metrics
        else None,
        "tolerance": dict(tolerance.allowed) if tolerance else None,
        "floor": {
            "measured": dict(tolerance.measured) if tolerance.measured else None,
            "analytic": dict(tolerance.analytic),
            "roundings": tolerance.roundings,
            "dtype": tolerance.dtype,
            "source": tolerance.source,
        }
        if tolerance
        else None,
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _strict(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(one) for one in value]
    return value
