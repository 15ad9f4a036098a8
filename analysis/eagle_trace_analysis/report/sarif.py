"""Cases as SARIF 2.1.0 (OASIS), as code scanning services read it.

A result per failure, error or warning; what passed or was skipped is none. Each rule is a cause, a check or a kind of
divergence. Files below the current folder are named relative to it, as such services match them; others by their URI.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle_trace import __version__
from eagle_trace.printable import json_text, printable
from eagle_trace_analysis.report.cases import Case, Outcome, Suite

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
VERSION = "2.1.0"
_LEVELS: dict[Outcome, str] = {"failed": "error", "error": "error", "warned": "warning"}


def to_sarif(suite: Suite, *, exit_status: int) -> str:
    """The suite as a SARIF log in JSON."""
    told = [case for case in suite.cases if case.outcome in _LEVELS]
    rules = list(dict.fromkeys(case.rule for case in told))
    run = {
        "tool": {
            "driver": {"name": "eagle-trace", "version": __version__, "rules": [_rule(one, told) for one in rules]}
        },
        "automationDetails": {"id": f"{suite.name.replace(' ', '/')}/"},
        "invocations": [
            {
                "executionSuccessful": suite.count("error") == 0,
                "exitCode": exit_status,
                "exitCodeDescription": suite.summary,
            }
        ],
        "results": [_result(case, suite, rules) for case in told],
    }
    log = {"$schema": SCHEMA, "version": VERSION, "runs": [run]}
    return json_text(json.dumps(log, indent=1, ensure_ascii=False)) + "\n"


def _rule(rule: str, cases: list[Case]) -> dict[str, Any]:
    first = next(case for case in cases if case.rule == rule)
    known = {"id": rule, "shortDescription": {"text": rule.replace("-", " ")}}
    return known | ({"help": {"text": printable(f"fix: {first.fix}")}} if first.fix else {})


def _result(case: Case, suite: Suite, rules: list[str]) -> dict[str, Any]:
    text = f"{case.name}: {case.text}" + (f"\nfix: {case.fix}" if case.fix else "")
    mark = hashlib.sha256(f"{suite.name}\0{case.rule}\0{case.name}".encode()).hexdigest()[:32]
    return {
        "ruleId": case.rule,
        "ruleIndex": rules.index(case.rule),
        "level": _LEVELS[case.outcome],
        "message": {"text": printable(text, keep="\n")},
        "locations": [
            {"physicalLocation": {"artifactLocation": {"uri": _uri(case.place)}, "region": {"startLine": 1}}}
        ],
        "partialFingerprints": {"eagleTrace/v1": mark},
    }


def _uri(place: str) -> str:
    """A file as a URI: relative to the current folder where it lies below that, else absolute; a folder by its seal."""
    if "://" in place:
        return place
    path = Path(place).absolute()
    if path.is_dir():
        path = path / "manifest.json"
    try:
        relative = path.relative_to(Path.cwd())
    except ValueError:
        return path.as_uri()
    return quote(relative.as_posix())
