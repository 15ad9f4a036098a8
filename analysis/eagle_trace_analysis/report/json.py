"""A diff as JSON (docs/diff-json.md says what each key means)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eagle_trace_analysis.comparison.result import AcceptLength, Diff, Divergence, SiteResult
from eagle_trace_analysis.pairing.pairs import Coverage
from eagle_trace_analysis.replay.replay import Measured, Replayed
from eagle_trace_analysis.report.strict import strict, strict_text

FORMAT_VERSION = 2


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
        "reference": _role(diff, "train"),
        "other": _role(diff, "serve"),
        "level": diff.level,
        "row_error": diff.row_error,
        "first_divergence": _divergence(first) if first else None,
        "frontier": [_divergence(one) for one in diff.frontier],
        "coverage": _coverage(diff.coverage) | {"minimum_share": diff.minimum_share},
        "captures": _coverage(diff.captures),
        "accept_length": _accept_length(diff.accept_length),
        "diagnosis": _diagnosis(diff),
        "unexplained": list(diff.diagnosis.unexplained) if diff.diagnosis else None,
        "replay": [_replayed(one) for one in diff.diagnosis.replay] if diff.diagnosis else None,
        "benign": [asdict(note) for note in diff.benign],
        "notes": [asdict(note) for note in diff.notes],
        "tolerance": diff.tolerance,
        "gate": _gate(diff),
        "sites": [_site(result) for result in diff.sites],
        "traces": {side: dict(facts) for side, facts in diff.traces.items()},
    }
    return strict(data)  # type: ignore[no-any-return]


def _gate(diff: Diff) -> dict[str, Any] | None:
    return None if diff.gate is None else asdict(diff.gate) | {"passed": diff.exit_status == 0}


def to_json_text(diff: Diff) -> str:
    """`to_json` as text, ending in a newline."""
    return strict_text(to_json(diff))


def _role(diff: Diff, today: str) -> dict[str, Any]:
    """What one of the two traces is called, and by which name the rest of the report speaks of it."""
    name = diff.roles.reference if today == "train" else diff.roles.other
    facts = diff.traces[today]
    return {"called": today, "name": name, "side": facts["side"], "host": facts["host"], "path": facts["path"]}


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


def _accept_length(accept: AcceptLength) -> dict[str, Any]:
    return {
        "predicted": accept.predicted,
        "observed": accept.observed,
        "rounds": accept.rounds,
        "by_depth": list(accept.by_depth),
        "by_prompt": dict(accept.by_prompt),
        "predicted_range": list(accept.predicted_range) if accept.predicted_range is not None else None,
        "predicted_by_depth": list(accept.predicted_by_depth),
        "predicted_rounds": accept.predicted_rounds,
        "predicted_basis": accept.predicted_basis or None,
        "undecided": accept.undecided,
        "better": accept.better,
        "worse": accept.worse,
        "branches": accept.branches,
        "reference": accept.reference,
        "comparable": accept.comparable,
    }


def _diagnosis(diff: Diff) -> list[dict[str, Any]] | None:
    if diff.diagnosis is None:
        return None
    return [
        {
            "cause": one.cause,
            "verdict": one.verdict,
            "evidence": one.evidence,
            "fix": one.fix if one.verdict == "confirmed" else None,
            "site": one.site,
            "to_test": one.fix if one.verdict == "not_tested" else None,
        }
        for one in diff.diagnosis.causes
    ]


def _replayed(one: Replayed) -> dict[str, Any]:
    return {
        "site": one.site,
        "step": one.step,
        "verdict": one.verdict,
        "why": one.reason,
        "serve": _measured(one.serve),
        "train": _measured(one.train),
        "allowed": dict(one.serve.allowed) if one.serve else None,
    }


def _measured(one: Measured | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return dict(one.figures())


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
        "metrics": {k: v for k, v in asdict(result.metrics).items() if v is not None} if result.metrics else None,
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
