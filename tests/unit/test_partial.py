"""Recordings that bad luck ended: what is whole is read, what is lost is said, and nothing is a traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import open_trace
from eagle_trace.capture import Rows
from eagle_trace.errors import (
    OutputExistsError,
    RecordingError,
    TraceDamagedError,
    TraceError,
    TraceNotFoundError,
    TraceUnsealedError,
)
from eagle_trace.manifest import OPEN_SEAL, Manifest
from eagle_trace.reader import Trace
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, diagnosed
from eagle_trace_analysis.report.show import summary
from eagle_trace_analysis.report.show_text import render_summary
from eagle_trace_analysis.report.text import render
from tests.support.pairs import DRAFT, TARGET
from tests.support.synthetic import Side, make_prompts, write_trace
from tests.support.tables import replace_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
SITES = ("embed", "fc.out", "norm")
WIDTH = 16


def rows_of(call: int, count: int) -> Rows:
    """Keys of the rows of one forward."""
    return Rows.build(
        prompt_id=[0] * count,
        root=list(range(call * count, (call + 1) * count)),
        step=[0] * count,
        token_id=[1] * count,
        position=[0] * count,
        call_id=call,
    )


def record_of(call: int, count: int) -> dict[str, Any]:
    """The row of calls.parquet of one forward."""
    return {"call_id": call, "role": "draft", "mode": "x", "batch_size": 1, "tokens": count}


def put_call(writer: TraceWriter, call: int, count: int = 4) -> None:
    """One forward of `count` rows at every site; its values say which call it was."""
    rows = rows_of(call, count)
    writer.put_rows(rows)
    for site in SITES:
        writer.put_values(site, rows, np.full((count, WIDTH), call, np.float32))
    writer.put_record("calls", record_of(call, count))


def begin(path: Path, **options: Any) -> TraceWriter:
    prepare_output(path)
    return TraceWriter(path, Manifest("serve", "values", "test"), **options)


def assert_consistent(trace: Trace) -> int:
    """Every table and site of the trace says the same rows; returns how many calls that are."""
    calls = len(trace.calls)
    for site in SITES:
        np.testing.assert_array_equal(trace.keys(site).root, trace.rows.root)
        np.testing.assert_array_equal(trace.values(site)[:, 0], trace.keys(site).call_id)
    assert sorted(set(trace.rows.call_id.tolist())) == list(range(calls))
    return calls


def run_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    given = [sys.executable, "-c", f"import time\nfrom tests.unit.test_partial import *\n{code}", *map(str, arguments)]
    return subprocess.Popen(given, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_host_killed_in_the_middle_leaves_all_but_the_last_moments(tmp_path: Path) -> None:
    child = run_child(
        """
import eagle_trace.writer as module
module.FLUSH_SECONDS = 0.1
writer = begin(Path(sys.argv[1]))
for call in range(10**6):
    put_call(writer, call)
    print(call, flush=True)
    time.sleep(0.002)
""",
        tmp_path / "t",
    )
    assert child.stdout is not None

    # what is taken when all has been saved twice is there when it has been saved twice more
    saved: list[bytes] = []
    last = early = int(child.stdout.readline())
    while len(saved) < 5:
        last = int(child.stdout.readline())
        seals = [file.read_bytes() for file in (tmp_path / "t").glob(OPEN_SEAL)]
        saved += [seal for seal in seals if seal not in saved[-1:]]
        early = last if len(saved) <= 2 else early
    child.kill()
    child.communicate()
    with pytest.raises(TraceUnsealedError, match="--allow-partial"):
        open_trace(tmp_path / "t")
    trace = open_trace(tmp_path / "t", allow_partial=True)
    calls = assert_consistent(trace)
    assert calls > early
    assert calls < last + 1000
    assert trace.missing == [f"what came after {trace.manifest.flushed}"]
    assert not trace.sealed
    # the open seal says who was recording; that process is gone, so the place can be had again
    prepare_output(tmp_path / "t", force=True)


def test_flush_puts_all_that_was_taken_into_whole_files(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    for call in range(3):
        put_call(writer, call)
        assert writer.flush()
        assert assert_consistent(open_trace(tmp_path / "t", allow_partial=True)) == call + 1
    assert assert_consistent(open_trace(writer.seal())) == 3


def test_files_are_closed_between_two_forwards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FLUSH_SECONDS", 0.0), ("_QUIET_SECONDS", 1e3), ("_CALL_SECONDS", 1e9)):
        monkeypatch.setattr(f"eagle_trace.writer.{name}", value)
    saved: list[int] = []
    save = TraceWriter._save

    def watched(self: TraceWriter) -> None:
        save(self)
        saved.append(assert_consistent(open_trace(tmp_path / "t", allow_partial=True)))

    monkeypatch.setattr(TraceWriter, "_save", watched)
    writer = begin(tmp_path / "t")
    for call in range(3):
        put_call(writer, call)
    writer.seal()
    assert saved == [1, 2, 3]


def test_a_part_that_grew_after_the_last_flush_is_read_as_it_was_then(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    put_call(writer, 0)
    writer.flush()
    before = (tmp_path / "t/manifest.partial.json").read_bytes()
    put_call(writer, 1)
    writer.flush()
    # as if the host had died between two parts of the second flush
    (tmp_path / "t/manifest.partial.json").write_bytes(before)
    assert assert_consistent(open_trace(tmp_path / "t", allow_partial=True)) == 1
    writer.seal()


def test_flushing_often_does_not_flood_the_disk_with_files(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    for call in range(30):
        put_call(writer, call)
        writer.flush()
    trace = open_trace(writer.seal())
    assert assert_consistent(trace) == 30
    assert len(trace.files) == len(SITES) + 2


def test_the_last_row_of_a_prompt_counts(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    for text in ("a", "b"):
        for number in (0, 1):
            record = {"prompt_id": number, "prompt_key": f"p{number}", "token_ids": [number], "num_prompt_tokens": 1}
            writer.put_record("prompts", record | {"text": text})
        writer.flush()
    trace = open_trace(writer.seal())
    assert trace.prompts.prompt_key.tolist() == ["p0", "p1"]
    assert trace.prompts.text.tolist() == ["b", "b"]


def test_a_recording_that_was_stopped_says_why(tmp_path: Path) -> None:
    writer = begin(tmp_path / "sealed")
    put_call(writer, 0)
    assert open_trace(writer.seal(stopped="the server was stopped")).manifest.stopped == "the server was stopped"
    writer = begin(tmp_path / "aborted")
    put_call(writer, 0)
    writer.abort(RuntimeError("the host went away"))
    trace = open_trace(tmp_path / "aborted", allow_partial=True)
    assert assert_consistent(trace) == 1
    assert trace.manifest.stopped == "the host went away"
    assert "the host went away" in trace.missing[0]
    assert trace.manifest.recorder == ""


def test_a_full_disk_is_one_sentence_and_what_was_whole_stays(tmp_path: Path) -> None:
    # no file may grow beyond 1 MB: the operating system refuses as it does on a full disk
    child = run_child(
        """
import resource
writer = begin(Path(sys.argv[1]))
for call in range(3):
    put_call(writer, call)
assert writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for call in range(3, 200):
    put_call(writer, call, 1000)
assert not writer.flush()
assert not writer.accepting
try:
    writer.seal()
except RecordingError as error:
    print(error)
""",
        tmp_path / "t",
    )
    out, errors = child.communicate(timeout=300)
    assert errors == ""
    assert f"recording into {tmp_path / 't'} failed: cannot write {tmp_path / 't'}/values/site=" in out
    assert "File too large (errno 27); what was whole before stays there" in out
    assert len(out.splitlines()) == 1
    trace = open_trace(tmp_path / "t", allow_partial=True)
    assert assert_consistent(trace) == 3
    assert "File too large" in trace.missing[0]
    assert trace.manifest.recorder == ""
    assert not list((tmp_path / "t").rglob("*.tmp"))


def test_a_folder_that_vanishes_is_not_made_again(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    put_call(writer, 0)
    writer.flush()
    shutil.rmtree(tmp_path / "t")
    put_call(writer, 1)
    with pytest.raises(RecordingError, match=r"No such file or directory \(errno 2\)"):
        writer.seal()
    assert not (tmp_path / "t").exists()


def test_a_file_that_vanishes_is_noticed_before_the_seal(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    put_call(writer, 0)
    writer.flush()
    next((tmp_path / "t" / "values").rglob("*.parquet")).unlink()
    with pytest.raises(RecordingError, match="cannot seal"):
        writer.seal()
    assert not (tmp_path / "t/manifest.json").exists()


def test_a_second_recorder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = begin(tmp_path / "t")
    put_call(first, 0)
    refused = []

    def second() -> None:
        try:
            TraceWriter(tmp_path / "t", Manifest("serve", "values", "test"))
        except OutputExistsError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=second) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert "two recorders" in refused[0]
    put_call(first, 1)
    assert assert_consistent(open_trace(first.seal())) == 2
    with pytest.raises(OutputExistsError):
        TraceWriter(tmp_path / "t", Manifest("serve", "values", "test"))


def test_force_does_not_replace_what_another_process_is_recording(tmp_path: Path) -> None:
    child = run_child("writer = begin(Path(sys.argv[1]))\nprint('ready', flush=True)\ntime.sleep(600)", tmp_path / "t")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(OutputExistsError, match=f"process {child.pid} is recording"):
        prepare_output(tmp_path / "t", force=True)
    child.kill()
    child.communicate()
    prepare_output(tmp_path / "t", force=True)


def test_force_never_follows_a_link(tmp_path: Path) -> None:
    writer = begin(tmp_path / "t")
    put_call(writer, 0)
    writer.seal()
    (tmp_path / "link").symlink_to(tmp_path / "t")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for place, words in (("link", "is a link to"), ("nowhere", "is a link to nothing")):
        with pytest.raises(OutputExistsError, match=words):
            prepare_output(tmp_path / place, force=True)
    assert assert_consistent(open_trace(tmp_path / "link")) == 1


WRONG: list[Any] = [None, 7, -1, "x", [1], {"a": 1}, {"../../x": {"rows": 1, "bytes": 1}}, [{"site": 1}], True, 1e400]


@pytest.mark.parametrize("name", sorted(set(json.loads(Manifest("serve", "values", "test").to_bytes())) - {"checksum"}))
def test_a_field_of_another_type_is_damage_and_no_traceback(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / "t", Side("serve"), make_prompts(1)).path
    written = json.loads((Path(path) / "manifest.json").read_text())
    # as a version without checksums wrote it, so that it is the type that is found wrong
    good = {field: value for field, value in written.items() if field not in ("checksum", "checksums")}
    for value in WRONG:
        (Path(path) / "manifest.json").write_text(json.dumps(good | {name: value}))
        try:
            trace = open_trace(path, allow_partial=True)
        except TraceError as error:
            assert str(path) in str(error)  # noqa: PT017 (some values are good ones)
        else:
            render_summary(summary(trace))
            assert repr(trace)
            assert trace._repr_html_()


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe{}", b"[" * 200_000, b'{"format_version": ' + b"9" * 5000 + b"}", b"", b"null", b'{"a":' * 90_000],
    ids=["not-utf8", "deep", "huge-number", "empty", "null", "deep-objects"],
)
def test_a_manifest_that_is_no_json_is_damage_and_no_traceback(tmp_path: Path, text: bytes) -> None:
    path = Path(write_trace(tmp_path / "t", Side("serve"), make_prompts(1)).path)
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(TraceDamagedError):
        open_trace(path, allow_partial=True)


def test_verify_finds_an_altered_byte(tmp_path: Path) -> None:
    path = Path(write_trace(tmp_path / "t", Side("serve"), make_prompts(1)).path)
    assert open_trace(path).verify() == []
    file = next((path / "values/site=fc.out").iterdir())
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    (problem,) = open_trace(path).verify()
    assert "site=fc.out" in problem
    done = subprocess.run(
        [sys.executable, "-m", "eagle_trace.cli.main", "show", str(path), "--verify"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert "checksum" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lost", [("prompts",), ("rounds",), ("topk",), ("rows",), ("calls",), ("params",), "all"])
def test_a_trace_without_some_tables_is_compared_diagnosed_and_shown(tmp_path: Path, lost: tuple[str, ...]) -> None:
    tables = ("prompts", "rounds", "topk", "calls", "params") if lost == "all" else lost
    for side in ("train", "broken"):
        pair = {name: GOLDEN / f"{name}.trace" for name in ("train", "broken")}
        pair[side] = tmp_path / f"{side}.trace"
        shutil.copytree(GOLDEN / f"{side}.trace", pair[side])
        for table in tables:
            (pair[side] / f"{table}.parquet").unlink(missing_ok=True)
        train, serve = (open_trace(path, allow_partial=True) for path in pair.values())
        result = diagnosed(diff(train, serve), train, serve, Checkpoints(train_draft=DRAFT, target=TARGET))
        render(result)
        for trace in (train, serve):
            render_summary(summary(trace))


def test_a_table_whose_file_is_garbage_is_named(tmp_path: Path) -> None:
    path = Path(write_trace(tmp_path / "t", Side("serve"), make_prompts(1)).path)
    writer = begin(tmp_path / "p")
    put_call(writer, 0)
    writer.abort(RuntimeError("gone"))
    (tmp_path / "p/rows.parquet/rank0-00000.parquet").write_bytes(b"PAR1 nothing PAR1")
    trace = open_trace(tmp_path / "p", allow_partial=True)
    assert len(trace.rows) == 0
    assert any("rows.parquet" in problem for problem in trace.missing)
    replace_table(path, "prompts", None)
    assert len(open_trace(path).prompts) == 0


def test_a_file_in_the_place_of_a_trace_is_told_from_nothing(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "x.json").write_text("{}")
    fsspec.filesystem("memory").pipe_file("/told/x.json", b"{}")
    for place in (tmp_path / "x.json", "memory://told/x.json"):
        with pytest.raises(TraceNotFoundError, match="is a file: a trace is the folder that"):
            open_trace(place)
    with pytest.raises(TraceNotFoundError, match="no such folder"):
        open_trace(tmp_path / "none")


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    code = """
import tempfile, eagle_trace.reader
from eagle_trace.cli.main import main
def slow(*_, **__):
    with tempfile.TemporaryDirectory(dir=out) as folder:
        print(folder, flush=True)
        time.sleep(60)
eagle_trace.reader.open_trace = slow
out, sys.argv = sys.argv[1], ["eagle-trace", "show", "x"]
main()
"""
    child = run_child(code, tmp_path)
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    assert folder.is_dir()
    os.kill(child.pid, signal.SIGTERM)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 143
    assert errors == "eagle-trace: terminated\n", "it recorded nothing that could have been sealed"
    assert not folder.exists()


def test_random_damage_is_an_error_of_ours_or_nothing(tmp_path: Path) -> None:
    path = Path(write_trace(tmp_path / "t", Side("serve"), make_prompts(1)).path)
    rng = np.random.default_rng(0)
    files = [file for file in path.rglob("*.parquet") if file.is_file() and "site=fc.out" in str(file)]
    files += [file for table in ("rows", "prompts", "calls", "topk") for file in (path / f"{table}.parquet").iterdir()]
    refused = 0
    for case in range(150):
        file = files[case % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        for _ in range(4):
            bad[rng.integers(len(bad) // 2, len(bad))] = rng.integers(256)
        file.write_bytes(bad)
        try:
            trace = open_trace(path)
            trace.frame("fc.out")
            render_summary(summary(trace))
            assert len(trace.rows) >= 0
            assert len(trace.topk) >= 0
        except TraceError:
            refused += 1
        file.write_bytes(good)
    assert refused > 100
    assert open_trace(path).verify() == []
