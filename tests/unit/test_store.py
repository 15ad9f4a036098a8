"""Traces on filesystems of fsspec's: the same as on a disk, in few reads, and refused in one sentence."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace.errors import (
    OutputExistsError,
    RecordingError,
    TraceDamagedError,
    TraceError,
    TraceNotFoundError,
    TraceUnsealedError,
    UsageError,
)
from eagle_trace.manifest import Manifest
from eagle_trace.reader import ValueReader
from eagle_trace.store import open_store
from eagle_trace.writer import TraceWriter, check_output, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.report.json import to_json
from tests.support.synthetic import Side, make_prompts, only, write_trace
from tests.unit.test_partial import assert_consistent, put_call

pytestmark = pytest.mark.slow

FAULT = only("layer.0.attn.q", 0, lambda _, values: values * 1.045)


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.rm("/", recursive=True)
    yield "memory://traces"
    filesystem.rm("/", recursive=True)


def write_pair(where: Any) -> list[Any]:
    sides = [("train.trace", Side("train")), ("serve.trace", Side("serve", fault=FAULT))]
    prompts = make_prompts(2)
    return [
        write_trace(where / name if isinstance(where, Path) else f"{where}/{name}", side, prompts)
        for name, side in sides
    ]


def facts(result: Any) -> dict[str, Any]:
    """A diff without the places of its traces."""
    data = to_json(result)
    for side in (*data["traces"].values(), data["reference"], data["other"]):
        del side["path"]
    return data


def test_two_traces_in_memory_compare_as_on_a_disk(memory: str, tmp_path: Path) -> None:
    ours, theirs = diff(*write_pair(memory)), diff(*write_pair(tmp_path))
    assert ours.verdict == "diverged"
    assert facts(ours) == facts(theirs)
    assert ours.traces["train"]["path"] == f"{memory}/train.trace"


def test_the_files_are_those_of_a_local_trace(memory: str, tmp_path: Path) -> None:
    write_pair(memory)
    write_pair(tmp_path)
    remote, local = (open_store(place).sizes() for place in (f"{memory}/serve.trace", tmp_path / "serve.trace"))
    assert remote.keys() == local.keys()
    assert "manifest.json" in remote
    frame = pd.read_parquet(f"{memory}/serve.trace/rows.parquet/rank0-00000.parquet")
    assert len(frame) == len(open_trace(f"{memory}/serve.trace").rows)


def test_an_unfinished_recording_can_be_read_in_part(memory: str) -> None:
    place = f"{memory}/t"
    prepare_output(place)
    writer = TraceWriter(place, Manifest("serve", "values", "test"))
    for call in range(3):
        put_call(writer, call)
        writer.flush()
    with pytest.raises(TraceUnsealedError):
        open_trace(place)
    assert assert_consistent(open_trace(place, allow_partial=True)) == 3
    put_call(writer, 3)
    assert writer.seal() == place
    trace = open_trace(place)
    assert assert_consistent(trace) == 4
    assert trace.verify() == []


def test_a_place_that_is_taken_is_refused_and_replaced_if_asked(memory: str) -> None:
    place = f"{memory}/t"
    prepare_output(place)
    first = TraceWriter(place, Manifest("serve", "values", "test"))
    with pytest.raises(OutputExistsError, match="two recorders"):
        TraceWriter(place, Manifest("serve", "values", "test"))
    first.seal()
    with pytest.raises(OutputExistsError, match="--force"):
        check_output(place)
    fsspec.filesystem("memory").pipe_file("/traces/precious/file", b"mine")
    with pytest.raises(OutputExistsError, match="no trace"):
        prepare_output(f"{memory}/precious", force=True)
    prepare_output(place, force=True)
    assert open_store(place).sizes() == {}


def test_damage_is_told_from_absence(memory: str) -> None:
    with pytest.raises(TraceNotFoundError):
        open_trace(f"{memory}/nothing")
    write_pair(memory)
    filesystem = fsspec.filesystem("memory")
    (file,) = filesystem.glob("/traces/serve.trace/values/site=fc.out/*")
    data = filesystem.cat_file(file)
    filesystem.pipe_file(file, data[:-9])
    with pytest.raises(TraceDamagedError, match=r"site=fc\.out.* bytes, not"):
        open_trace(f"{memory}/serve.trace")
    filesystem.pipe_file(file, data[:-9] + b"\0" * 9)
    with pytest.raises(TraceDamagedError, match="cannot be read as Parquet"):
        open_trace(f"{memory}/serve.trace").values("fc.out")
    filesystem.rm(file)
    with pytest.raises(TraceDamagedError, match="is missing"):
        open_trace(f"{memory}/serve.trace")


def test_a_row_group_is_read_once_and_in_one_piece(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_trace.streams.ROW_GROUP_BYTES", 512 << 10)
    place = f"{memory}/t"
    values = np.random.default_rng(0).standard_normal((2000, 512)).astype(np.float32)
    writer = TraceWriter(place, Manifest("serve", "values", "test"))
    for start in range(0, 2000, 100):
        from tests.unit.test_trace import make_rows

        writer.put_values("embed", make_rows(100, start), values[start : start + 100].copy())
    writer.seal()
    trace = open_trace(place)
    (data,) = trace.site_data("embed")
    read: Counter[str] = Counter()
    original = MemoryFile.read

    def counted(self: MemoryFile, *args: Any) -> bytes:
        got: bytes = original(self, *args)
        read["times"] += 1
        read["bytes"] += len(got)
        return got

    monkeypatch.setattr(MemoryFile, "read", counted)
    reader = ValueReader(data)
    order = np.random.default_rng(1).permutation(2000)
    for some in np.array_split(order, 40):
        np.testing.assert_array_equal(reader.take(some), values[some])
    assert len(data.groups) > 5
    assert read["times"] == len(data.groups)
    assert values.nbytes <= read["bytes"] < 1.02 * values.nbytes


def test_the_command_line_takes_urls(memory: str, tmp_path: Path) -> None:
    write_pair(memory)
    run = CliRunner().invoke
    places = [f"{memory}/train.trace", f"{memory}/serve.trace"]
    result = run(app, ["diff", *places, "--no-diagnose"])
    assert result.exit_code == 1, result.output
    assert "layer.0.attn.q" in result.stdout
    shown = run(app, ["show", places[1], "--verify"])
    assert shown.exit_code == 0
    assert "serve trace of" in shown.stdout
    assert run(app, ["show", f"{memory}/nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("gs://bucket/run.trace", "pip install gcsfs"),
        ("nonsense://bucket/run.trace", "nonsense"),
        ("http://localhost:1/run.trace", "localhost"),
    ],
)
def test_a_place_nobody_can_reach_is_one_sentence(place: str, words: str) -> None:
    result = CliRunner().invoke(app, ["show", place])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    with pytest.raises((UsageError, RecordingError)):
        prepare_output(place)


def test_whatever_a_driver_raises_is_a_sentence(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers have errors of their own (botocore's NoCredentialsError is no OSError)."""

    class NoCredentialsError(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    writer = TraceWriter(f"{memory}/t", Manifest("serve", "values", "test"))
    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    with pytest.raises(TraceError, match="Unable to locate credentials"):
        open_trace(f"{memory}/t")
    with pytest.raises(RecordingError, match="Unable to locate credentials"):
        prepare_output(f"{memory}/t")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    put_call(writer, 0)
    with pytest.raises(RecordingError, match="Unable to locate credentials"):
        writer.seal()
    with pytest.raises(RecordingError, match="Unable to locate credentials"):
        TraceWriter(f"{memory}/u", Manifest("serve", "values", "test"))


def test_a_local_url_is_a_local_folder(tmp_path: Path) -> None:
    write_pair(tmp_path)
    trace = open_trace(f"file://{tmp_path}/serve.trace")
    assert trace.path == tmp_path / "serve.trace"
    shutil.copytree(tmp_path / "serve.trace", tmp_path / "with#odd ?name.trace")
    assert len(open_trace(tmp_path / "with#odd ?name.trace").rows) == len(trace.rows)
