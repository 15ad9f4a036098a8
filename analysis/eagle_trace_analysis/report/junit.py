"""Cases as JUnit XML, in the form that GitLab, Jenkins and GitHub's readers agree on.

One ``testsuites`` with one ``testsuite``; each ``testcase`` has at most one of ``failure``, ``error`` and ``skipped``.
Only characters that XML 1.0 allows are written: what has no glyph is shown as an escape.
"""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from eagle_trace.printable import printable
from eagle_trace_analysis.report.cases import Case, Suite


def to_junit(suite: Suite) -> str:
    """The suite as an XML document."""
    counts = {
        "tests": len(suite.cases), "failures": suite.count("failed"), "errors": suite.count("error"),
        "skipped": suite.count("skipped"),
    }  # fmt: skip
    attributes = {name: str(count) for name, count in counts.items()} | {"time": "0"}
    # the schema that Jenkins holds reports against knows no `skipped` of all suites together
    whole = {name: value for name, value in attributes.items() if name != "skipped"}
    root = ET.Element("testsuites", {"name": "eagle-trace"} | whole)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    node = ET.SubElement(root, "testsuite", {"name": suite.name, "timestamp": stamp} | attributes)
    for case in suite.cases:
        _add(node, suite, case)
    ET.SubElement(node, "system-out").text = printable(suite.summary)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _add(node: ET.Element, suite: Suite, case: Case) -> None:
    classname = suite.name.replace(" ", ".")
    one = ET.SubElement(node, "testcase", {"name": printable(case.name), "classname": classname, "time": "0"})
    text = printable(f"{case.text}\nfix: {case.fix}" if case.fix else case.text, keep="\n")
    if case.outcome in ("failed", "error"):
        tag = "failure" if case.outcome == "failed" else "error"
        told = {"message": printable(case.text), "type": case.rule}
        ET.SubElement(one, tag, told).text = text
    elif case.outcome == "skipped":
        ET.SubElement(one, "skipped", {"message": printable(case.text)})
    elif case.outcome == "warned":
        ET.SubElement(one, "system-out").text = f"warning: {text}"
