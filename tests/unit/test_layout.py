"""The documents name files: every one of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANALYSIS = ROOT / "analysis/eagle_trace_analysis"
NAMED = re.compile(r"`((?:[\w.]+/)+(?:[\w.]+\.\w+)?)`")


def named_in(document: str) -> list[str]:
    found = NAMED.findall((ROOT / document).read_text(encoding="utf-8"))
    return list(dict.fromkeys(name for name in found if "<" not in name))


@pytest.mark.parametrize("document", ["docs/architecture.md", "tests/newcomer.md"])
def test_every_file_that_a_document_names_exists(document: str) -> None:
    names = named_in(document)
    assert len(names) > 20
    assert [name for name in names if not ((ROOT / name).exists() or (ANALYSIS / name).exists())] == []


def test_there_are_twenty_questions_and_each_has_a_file() -> None:
    lines = (ROOT / "tests/newcomer.md").read_text(encoding="utf-8").splitlines()
    questions = [line for line in lines if re.match(r"\| \d+\. ", line)]
    assert len(questions) == 20
    assert all(NAMED.search(line.rsplit("|", 2)[1]) for line in questions)


def test_no_file_of_the_analysis_is_longer_than_can_be_read() -> None:
    long = {p.name: n for p in ANALYSIS.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert long == {}
