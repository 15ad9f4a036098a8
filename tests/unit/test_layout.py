"""The documents name files: every one of them is there."""

from __future__ import annotations

import ast
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


def product() -> list[Path]:
    return [path for root in ("eagle_trace", "recorders", "analysis") for path in sorted((ROOT / root).rglob("*.py"))]


def test_no_file_of_the_product_is_longer_than_can_be_read() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in product()}
    assert len(lines) > 300
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_function_does_more_than_can_be_read() -> None:
    """What it does: without its signature, which a command line makes long, and its docstring."""
    long = {}
    for path in product():
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                body = one.body[ast.get_docstring(one, clean=False) is not None :]
                count = one.body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                if count > 60:
                    long[f"{path.relative_to(ROOT)}: {one.name}"] = count
    assert long == {}
