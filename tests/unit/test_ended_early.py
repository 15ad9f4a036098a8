"""A recording that ended before it was done says so wherever its trace is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli import main
from eagle_trace.errors import UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.reader import Trace
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.report.text import render
from tests.support.synthetic import Side, make_prompts, write_trace
from tests.support.tables import edit_manifest

WHY = "the disk was too slow"
SAID = f"the recording ended early: {WHY}"


def without_rows(path: Path, prompts: list[dict[str, Any]]) -> Trace:
    """What a server leaves whose recording failed before the first forward: prompts, and why there is no more."""
    prepare_output(path)
    writer = TraceWriter(path, Manifest("serve", "values", "sglang", dtype="float32"))
    for record in prompts:
        writer.put_record("prompts", record)
    return open_trace(writer.seal(stopped=WHY))


def stopped(path: Path, name: str = "manifest.json") -> Path:
    """`path`, as if its recording had been ended."""
    edit_manifest(path, lambda manifest: manifest.update(stopped=WHY), name)
    return path


def words(result: Diff) -> str:
    """The report without its spaces, since lines are broken anywhere in a long path."""
    return "".join(render(result).split())


def closed(text: str) -> str:
    """`text` as `words` has it."""
    return "".join(text.split())


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Trace, Trace]:
    prompts = make_prompts(2)
    return write_trace(tmp_path / "train", Side("train"), prompts), write_trace(
        tmp_path / "serve", Side("serve"), prompts
    )


def test_the_reason_stands_beside_rows_that_are_missing(whole: tuple[Trace, Trace], tmp_path: Path) -> None:
    train, serve = whole
    failed = without_rows(tmp_path / "failed", serve.table("prompts").to_pylist())
    result = diff(train, failed)
    assert result.exit_status == 2
    assert closed("no row in common") in words(result)
    assert closed(f"of {failed.path} {SAID}") in words(result)
    empty = without_rows(tmp_path / "empty", [])
    assert closed(f"of {empty.path} {SAID}") in words(diff(train, empty))


def test_traces_that_agree_say_it_too(whole: tuple[Trace, Trace]) -> None:
    train, serve = whole
    stopped(Path(serve.path))
    result = diff(train, open_trace(serve.path))
    assert result.exit_status == 0
    assert any(SAID in note.text for note in result.notes)


def test_there_is_nothing_to_replay(whole: tuple[Trace, Trace], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from eagle_trace_training.replay import open_replay

    failed = without_rows(tmp_path / "failed", whole[1].table("prompts").to_pylist())
    with pytest.raises(UsageError, match=f"holds no row to replay: {SAID}"):
        open_replay(failed.path)
    assert open_replay(stopped(Path(whole[1].path))).manifest.ended_early == SAID, "what there is can be"


def test_show_says_it_in_the_first_line(whole: tuple[Trace, Trace]) -> None:
    result = CliRunner().invoke(main.app, ["show", str(stopped(Path(whole[1].path)))])
    assert result.exit_code == 0
    assert "ENDED EARLY" in result.stdout.splitlines()[0]
    assert SAID in result.stdout
    trace = open_trace(whole[1].path)
    assert SAID in repr(trace)
    assert SAID in trace._repr_html_()


def test_the_reason_of_another_rank_counts(tmp_path: Path) -> None:
    from tests.unit.test_ranks import manifest

    prepare_output(tmp_path / "t")
    for rank in range(2):
        TraceWriter(tmp_path / "t", manifest(rank, 2, tp=rank)).seal(WHY if rank else None)
    assert open_trace(tmp_path / "t").manifest.ended_early == f"{SAID} (rank 1)"
