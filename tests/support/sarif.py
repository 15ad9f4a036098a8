"""What the schema of SARIF 2.1.0 wants of a log such as ours: required properties, types and values of each object."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

LEVELS = ("none", "note", "warning", "error")


def check_sarif(log: Any) -> None:
    """Assert that `log` is as the schema has it, and that code scanning services find what they need."""
    _object(log, {"version": str, "runs": list}, {"$schema": str})
    assert log["version"] == "2.1.0"
    for run in log["runs"]:
        _object(run, {"tool": dict}, {"results": list, "invocations": list, "automationDetails": dict})
        _object(run["tool"], {"driver": dict})
        driver = run["tool"]["driver"]
        _object(driver, {"name": str}, {"version": str, "rules": list, "informationUri": str})
        for rule in driver["rules"]:
            _object(rule, {"id": str}, {"shortDescription": dict, "help": dict})
            for name in rule.keys() - {"id"}:
                _object(rule[name], {"text": str})
        assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
        for one in run["invocations"]:
            _object(one, {"executionSuccessful": bool}, {"exitCode": int, "exitCodeDescription": str})
        for result in run["results"]:
            _check_result(result, driver["rules"])
        marks = [tuple(result["partialFingerprints"].values()) for result in run["results"]]
        assert len(set(marks)) == len(marks), "two results would be taken for one"


def _check_result(result: Any, rules: list[Any]) -> None:
    optional = {"ruleId": str, "ruleIndex": int, "level": str, "locations": list, "partialFingerprints": dict}
    _object(result, {"message": dict}, optional)
    _object(result["message"], {"text": str})
    assert result["level"] in LEVELS
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["locations"], "services refuse a result without a place"
    for place in result["locations"]:
        _object(place, {"physicalLocation": dict})
        _object(place["physicalLocation"], {"artifactLocation": dict, "region": dict})
        _object(place["physicalLocation"]["region"], {"startLine": int})
        assert place["physicalLocation"]["region"]["startLine"] >= 1
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii()
        assert not set(uri) & set(' <>"{}|\\^`'), "no URI reference"
        assert urlsplit(uri).scheme in ("", "file", "s3")


def _object(value: Any, required: dict[str, type], optional: dict[str, type] | None = None) -> None:
    assert isinstance(value, dict)
    known = required | (optional or {})
    assert required.keys() <= value.keys() <= known.keys()
    for name, held in value.items():
        assert isinstance(held, known[name]), (name, held)
        assert not (known[name] is int and isinstance(held, bool))
