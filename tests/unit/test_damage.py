"""What was altered is never taken for what was recorded, and what lies is never a traceback or a hang."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_trace import open_trace
from eagle_trace.checksums import PIECE_BYTES, Hasher, Pieces, VerifiedFile, digest
from eagle_trace.errors import TraceDamagedError, TraceError
from eagle_trace.manifest import OPEN_SEAL, Manifest, open_seal_name, seal_name, sealed_json
from eagle_trace.writer import TraceWriter
from eagle_trace_analysis import diff
from eagle_trace_analysis.comparison.compare import compare_values, partition
from eagle_trace_analysis.pairing.align import align
from eagle_trace_analysis.report.show import summary
from eagle_trace_analysis.report.show_text import render_summary
from tests.support.damage import KINDS, Pair, make_pairs, outcome
from tests.support.liars import read_part, replace_part, tell, use
from tests.support.tables import edit_manifest
from tests.unit.test_trace import make_rows, write_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
VALUES = "values/site=fc.out/rank0-00000.parquet"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    return make_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def pair(pairs: list[Pair], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the sound pair at level values, to be spoilt."""
    (whole,) = [one for one in pairs if one.name == "values"]
    for side in (whole.train, whole.serve):
        shutil.copytree(side, tmp_path / side.name)
    return tmp_path / "train", tmp_path / "serve"


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_no_damage_ends_in_another_result(pairs: list[Pair]) -> None:
    """`python -m tests.support.damage` does thousands of these."""
    found = [(pairs[number % len(pairs)].name, *outcome(pairs[number % len(pairs)], number, 7)) for number in range(56)]
    assert [one for one in found if one[2] not in ("refused", "same")] == []
    assert sum(what == "refused" for _, _, what in found) > 45
    assert {kind for _, kind, _ in found} == {kind.__name__ for kind in KINDS}


def test_the_same_flips_in_a_trace_without_checksums_go_unnoticed(pair: tuple[Path, Path]) -> None:
    """So that it is known that the checksums are what finds them."""
    train, serve = pair
    _without_checksums(serve)
    data = bytearray((serve / VALUES).read_bytes())
    at = data.index(open_trace(serve).values("fc.out")[3].tobytes())
    data[at + 3] ^= 0x40
    (serve / VALUES).write_bytes(data)
    result = diff(open_trace(train), open_trace(serve))
    assert result.verdict == "diverged"
    (note,) = [note for note in result.notes if note.name == "no-checksums"]
    assert str(serve) in note.text


def _without_checksums(trace: Path) -> None:
    """As a version before checksums wrote it."""
    for file in list(trace.rglob("*.parquet")):
        if file.is_file():
            replace_part(
                trace, file.relative_to(trace).as_posix(), read_part(trace, file.relative_to(trace).as_posix())
            )


def test_every_byte_of_a_values_file_is_covered(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", {"fc.out": np.arange(12, dtype=np.float32).reshape(3, 4)})
    (file,) = (path / "values/site=fc.out").iterdir()
    sound = file.read_bytes()

    def read() -> str:
        frame = open_trace(path).frame("fc.out")
        return frame.to_json()

    whole = read()
    for at in [*range(8), *range(8, len(sound), 29)]:
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        try:
            assert read() == whole
            assert at < 4  # the magic number at the beginning says nothing, and nobody reads it
        except TraceDamagedError as error:
            assert str(file) in str(error)  # noqa: PT017 (a few bytes are read by nobody)
        assert open_trace(path).verify() != []


def test_every_byte_of_a_manifest_is_covered(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", {"fc.out": np.ones((3, 4), np.float32)}) / "manifest.json"
    sound = path.read_bytes()
    for at in [*range(0, len(sound) - 50, 5), *range(len(sound) - 50, len(sound))]:
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        with pytest.raises(TraceError, match="manifest"):
            open_trace(path.parent)


def test_a_part_of_a_diff_that_ran_elsewhere_is_verified_there(pair: tuple[Path, Path]) -> None:
    train, serve = (open_trace(path) for path in pair)
    parts = partition(train, serve, "fc.out", align(train, serve).pairs("fc.out"))
    sent = pickle.dumps(parts[0])
    assert compare_values(pickle.loads(sent))
    data = bytearray((pair[1] / VALUES).read_bytes())
    data[len(data) // 3] ^= 1
    (pair[1] / VALUES).write_bytes(data)
    with pytest.raises(TraceDamagedError, match="was altered"):
        compare_values(pickle.loads(sent))


def test_a_manifest_of_another_recording_is_refused_among_ranks(pairs: list[Pair], tmp_path: Path) -> None:
    (ranks,) = [one for one in pairs if one.name == "ranks"]
    shutil.copytree(ranks.serve, tmp_path / "t")
    edit_manifest(tmp_path / "t", lambda data: data["draft"].update(config_digest="another"), seal_name(1))
    with pytest.raises(TraceDamagedError, match="different recordings"):
        open_trace(tmp_path / "t")


def test_shards_that_were_fed_other_tokens_are_not_put_together(pairs: list[Pair], tmp_path: Path) -> None:
    (ranks,) = [one for one in pairs if one.name == "ranks"]
    shutil.copytree(ranks.serve, tmp_path / "t")
    name = "values/site=layer.0.attn.q/rank1-00000.parquet"
    table = read_part(tmp_path / "t", name)
    tokens = pa.array([token + 1 for token in table.column("token_id").to_pylist()], pa.int32())
    changed = table.set_column(table.schema.get_field_index("token_id"), "token_id", tokens)
    pq.write_table(changed, tmp_path / "t" / name)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name]["bytes"] = (tmp_path / "t" / name).stat().st_size
        del manifest["checksums"][name]

    edit_manifest(tmp_path / "t", change, seal_name(1))
    with pytest.raises(TraceDamagedError, match="other tokens"):
        open_trace(tmp_path / "t").site_data("layer.0.attn.q")


def test_a_part_of_another_recording_is_not_taken_for_one_that_grew(tmp_path: Path) -> None:
    def begun(path: Path, count: int) -> Path:
        path.mkdir()
        writer = TraceWriter(path, Manifest("serve", "values", "test"))
        writer.put_values("fc.out", make_rows(count), np.full((count, 4), count, np.float32))
        writer.abort(RuntimeError("the host went away"))
        return path / VALUES

    mine, other = begun(tmp_path / "mine", 3), begun(tmp_path / "other", 5)
    assert open_trace(tmp_path / "mine", allow_partial=True).values("fc.out").shape == (3, 4)
    mine.write_bytes(other.read_bytes())
    trace = open_trace(tmp_path / "mine", allow_partial=True)
    assert trace.site_data("fc.out") == []
    assert "not the file that was recorded" in trace.missing[-1]


def test_a_trace_of_an_older_version_is_read_and_said_to_have_no_checksums() -> None:
    train, broken = (open_trace(GOLDEN / f"{name}.trace") for name in ("train", "broken"))
    assert len(train.unchecked) == len(train.files)
    assert summary(train)["without_checksums"] == len(train.files)
    assert "have no checksum" in render_summary(summary(train))
    notes = [note for note in diff(train, broken).notes if note.name == "no-checksums"]
    assert len(notes) == 2


def test_a_new_trace_has_a_checksum_for_every_file(pair: tuple[Path, Path]) -> None:
    trace = open_trace(pair[0])
    assert trace.unchecked == []
    assert "checksum" not in render_summary(summary(trace))
    assert trace.verify() == []


# ---- the checksums themselves ----------------------------------------------------------------------------------------


def test_pieces_cover_what_was_written_and_a_large_page_is_one_of_its_own() -> None:
    hasher = Hasher()
    writes = [b"PAR1", b"k" * 300, b"h" * 20, b"v" * PIECE_BYTES, *[b"s" * 1000] * 70]
    for data in writes:
        hasher.update(data)
    text = hasher.text()
    whole = b"".join(writes)
    pieces = Pieces(text)
    assert pieces.bytes == len(whole)
    assert pieces.ends.tolist()[:2] == [324, 324 + PIECE_BYTES]
    assert len(pieces.digests) == 4
    for number, value in enumerate(pieces.digests):
        assert digest(whole[pieces.start(number) : pieces.ends[number]]) == value


@pytest.mark.parametrize("text", ["x", "1:", "0:0000000000000000", "1:0000000000000000 ", "-1:0000000000000000"])
def test_a_list_of_pieces_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        Pieces(text)


def test_any_range_of_a_verified_file_is_that_of_the_file() -> None:
    rng = np.random.default_rng(0)
    data, footer = rng.bytes(5000), rng.bytes(100)
    text = " ".join(f"{end - start}:{digest(data[start:end])}" for start, end in ((0, 10), (10, 3000), (3000, 5000)))

    class Source:
        size = len(data) + len(footer)

        def read_at(self, start: int, count: int) -> bytes:
            return (data + footer)[start : start + count]

        def close(self) -> None:
            pass

    file = VerifiedFile(Source(), Pieces(text), footer)
    for _ in range(300):
        start, count = (int(one) for one in rng.integers(0, 5200, 2))
        file.seek(start)
        assert bytes(file.read(count)) == (data + footer)[start : start + count]
        assert file.tell() == max(start, min(start + count, 5100))


def test_whatever_a_config_or_a_client_says_a_sealed_manifest_can_be_read() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    made = Manifest("serve", "values", "test")
    made.settings = {"deep": deep, "huge": 10**5000, "limit": [0.0, float("inf")], "features": 7, "sglang_args": "x"}
    made.draft = {"path": 5, "dropped_keys": 3, "config": {"time_step_limit": [0.0, float("inf")]}}
    read = Manifest.from_json(made.to_bytes(), "here")
    assert read.draft["config"]["time_step_limit"] == [0.0, "Infinity"]
    assert read.settings["features (as given)"] == "7"
    assert "features" not in read.settings
    assert Manifest.from_json(read.to_bytes(), "here") == read


# ---- files that are none ---------------------------------------------------------------------------------------------


def _as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _as_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _as_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def _as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [VALUES, "prompts.parquet/rank0-00000.parquet", "manifest.json"])
@pytest.mark.parametrize("spoil", [_as_pipe, _as_device, _as_loop, _as_folder])
def test_what_is_not_a_regular_file_is_missing(
    spoil: Callable[[Path], None], name: str, pair: tuple[Path, Path]
) -> None:
    spoil(pair[0] / name)
    with pytest.raises(TraceError, match=r"missing|no manifest|cannot read"):
        open_trace(pair[0])


@pytest.mark.timeout(60)
def test_ranks_that_there_cannot_be_are_one_sentence(pair: tuple[Path, Path]) -> None:
    serve = pair[1]
    shutil.copy(serve / "manifest.json", serve / "manifest.rank99999999.json")
    with pytest.raises(TraceDamagedError, match="does not belong"):
        open_trace(serve)
    (serve / "manifest.rank99999999.json").unlink()
    edit_manifest(serve, lambda data: data.update(ranks=1 << 16))
    with pytest.raises(TraceError, match="65527 more ranks"):
        open_trace(serve)
    for rank in range(1, 2000):
        (serve / open_seal_name(rank)).write_bytes(b"{}")
    with pytest.raises(TraceDamagedError, match="not a manifest"):
        open_trace(serve, allow_partial=True)


def test_a_manifest_larger_than_any_is_not_read(pair: tuple[Path, Path]) -> None:
    with (pair[0] / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(TraceDamagedError, match="more than any"):
        open_trace(pair[0])


# ---- traces that lie -------------------------------------------------------------------------------------------------


def _column(name: str, column: str, made: Callable[[list[Any]], pa.Array]) -> Callable[[Path], None]:
    def change(trace: Path) -> None:
        table = read_part(trace, name)
        at = table.schema.get_field_index(column)
        replace_part(trace, name, table.set_column(at, column, made(table.column(at).to_pylist())))

    return change


def _metadata(**facts: str) -> Callable[[Path], None]:
    def change(trace: Path) -> None:
        table = read_part(trace, VALUES)
        given = {f"eagle_trace.{name}".encode(): value.encode() for name, value in facts.items()}
        replace_part(trace, VALUES, table.replace_schema_metadata((table.schema.metadata or {}) | given))

    return change


def _nulls(kind: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    return lambda values: pa.array([None, *values[1:]], kind)


ROWS, TOPK, CALLS = (f"{name}.parquet/rank0-00000.parquet" for name in ("rows", "topk", "calls"))
LIES: dict[str, Callable[[Path], object]] = {
    "nulls in a key column": _column(ROWS, "root", _nulls(pa.int32())),
    "nulls in a key column of values": _column(VALUES, "root", _nulls(pa.int32())),
    "nulls in the values": _column(VALUES, "values", _nulls(pa.binary(128))),
    "nulls in a path": _column(ROWS, "path", lambda v: pa.array([*v[:-1], [None] * len(v[-1])], pa.list_(pa.int32()))),
    "values as text": _column(VALUES, "values", lambda v: pa.array(["x"] * len(v))),
    "values of any length": _column(VALUES, "values", lambda v: pa.array(v, pa.binary())),
    "values of another width": _column(VALUES, "values", lambda v: pa.array([x[:64] for x in v], pa.binary(64))),
    "steps below 0": _column(ROWS, "step", lambda v: pa.array([-1, *v[1:]], pa.int32())),
    "steps without end": _column(ROWS, "step", lambda v: pa.array([2**31 - 1, *v[1:]], pa.int32())),
    "ranks that do not count": _column(TOPK, "rank", lambda v: pa.array([7] * len(v), pa.int32())),
    "shapes without sizes": _column(
        CALLS, "shapes", lambda v: pa.array([[{"site": "fc.out", "shape": [], "dtype": "float32"}]] * len(v))
    ),
    "no part of none": _metadata(shard="0/0"),
    "the third part of two": _metadata(shard="2/2"),
    "a part of very many": _metadata(shard="0/9999999"),
    "a width of thousands of digits": _metadata(width="9" * 5001),
    "no width": _metadata(width="0"),
    "half the width": _metadata(width="16"),
    "another dtype": _metadata(dtype="float16"),
    "a dtype that is none": _metadata(dtype="object"),
    "another level": _metadata(level="sketch"),
    "another site": _metadata(site="logits"),
    "more rows than there are": lambda t: edit_manifest(t, lambda m: m["files"][VALUES].update(rows=10**9)),
    "a target's path that is not text": lambda t: edit_manifest(t, lambda m: m["target"].update(path={"a": 1})),
    "a file elsewhere": lambda t: edit_manifest(t, lambda m: m["files"].update({"../x": {"rows": 1, "bytes": 1}})),
    "a file of another rank": lambda t: edit_manifest(
        t, lambda m: m["files"].update({"rows.parquet/rank7-00000.parquet": {"rows": 1, "bytes": 1}})
    ),
    "a rank of thousands of digits": lambda t: edit_manifest(
        t, lambda m: m["files"].update({f"rows.parquet/rank{'9' * 5000}-0.parquet": {"rows": 1, "bytes": 1}})
    ),
    "a rank beyond all": lambda t: edit_manifest(t, lambda m: m.update(rank=5)),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_trace_that_says_what_cannot_be_is_refused_in_one_sentence(
    lie: Callable[[Path], object], pair: tuple[Path, Path]
) -> None:
    lie(pair[1])
    if isinstance(json.loads((pair[1] / "manifest.json").read_bytes())["target"].get("path (as given)"), str):
        # written by hand, since a writer of ours would not
        data = json.loads((pair[1] / "manifest.json").read_bytes())
        data["target"] = {"path": {"a": 1}}
        data.pop("checksum"), data.pop("checksums")
        (pair[1] / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(TraceError) as caught:
        diff(*(open_trace(path) for path in pair))
    assert "\n" not in str(caught.value)
    assert str(pair[1]) in str(caught.value)


def test_rows_that_the_manifest_does_not_count_are_none(pair: tuple[Path, Path]) -> None:
    edit_manifest(pair[1], lambda data: data["files"][VALUES].update(rows=0))
    assert open_trace(pair[1]).site_data("fc.out") == []


@pytest.mark.timeout(120)
def test_lies_end_in_no_traceback(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that overflow are not a traceback
        for number in range(12):
            rng = np.random.default_rng([11, number])
            shutil.rmtree(tmp_path / "work", ignore_errors=True)
            for side in pair:
                shutil.copytree(side, tmp_path / "work" / side.name)
            told = tell(tmp_path / "work" / ("train", "serve")[number % 2], rng)
            assert use(tmp_path / "work/train", tmp_path / "work/serve", partial=number % 3 == 0) == [], (number, told)


def test_settings_nested_deeply_are_shown_as_an_error_not_a_traceback(pair: tuple[Path, Path]) -> None:
    data = json.loads((pair[1] / "manifest.json").read_bytes())
    data.pop("checksum"), data.pop("checksums")
    text = json.dumps(data | {"settings": {"deep": 0}}).replace(
        '{"deep": 0}', '{"deep": ' + "[" * 900 + "]" * 900 + "}"
    )
    (pair[1] / "manifest.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "eagle_trace.cli.main", "show", str(pair[1]), "--format", "json"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "its settings is not what it must be" in done.stderr


def test_a_footer_that_counts_more_rows_than_its_file_can_hold_is_refused(pair: tuple[Path, Path]) -> None:
    table = pa.table({"root": pa.array(np.zeros(1 << 24, np.int32))})
    pq.write_table(table, pair[1] / ROWS, compression="zstd")

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][ROWS] = {"rows": 1 << 24, "bytes": (pair[1] / ROWS).stat().st_size}
        del manifest["checksums"][ROWS]

    edit_manifest(pair[1], change)
    with pytest.raises(TraceDamagedError, match="16777216 rows in"):
        open_trace(pair[1]).rows  # noqa: B018


def test_an_open_manifest_is_covered_too(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", Manifest("serve", "values", "test"))
    writer.put_values("fc.out", make_rows(3), np.ones((3, 4), np.float32))
    writer.abort(RuntimeError("the host went away"))
    path = tmp_path / "t" / OPEN_SEAL
    sound = path.read_bytes()
    path.write_bytes(sound.replace(b'"rows": 3', b'"rows": 2'))
    with pytest.raises(TraceDamagedError, match="was altered"):
        open_trace(tmp_path / "t", allow_partial=True)
    path.write_bytes(sealed_json(json.loads(sound)))
    assert open_trace(tmp_path / "t", allow_partial=True).values("fc.out").shape == (3, 4)
