"""`record --attach` and a server that means harm: one sentence, in time, and nothing is left behind."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace.contents import is_trace_file, trace_files
from eagle_trace.errors import EagleTraceError, RecordingError, UsageError
from eagle_trace_serving import remote
from eagle_trace_serving.answers import NonsenseError, understood
from eagle_trace_serving.archive import ArchiveError, unpack
from eagle_trace_serving.exchange import quoted
from eagle_trace_serving.record import attach
from tests.support.hostile_server import (
    NAME,
    TOKEN,
    Answer,
    breaks_off,
    drips_headers,
    endless,
    good_answers,
    member,
    packed,
    raw,
    says,
    serving,
    tar_of,
)
from tests.support.synthetic import Side, make_prompts, write_trace

TRACE = f"GET /eagle_trace/traces/{NAME}"
START, FINISH, STATUS = "POST /eagle_trace/start", "POST /eagle_trace/finish", "GET /eagle_trace"
PLACE = f"/there/{NAME}"
PART = "rows.parquet/rank0-00000.parquet"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / NAME
    write_trace(path, Side("serve"), make_prompts(1))
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The client's folder."""
    here = tmp_path / "deep" / "down"
    here.mkdir(parents=True)
    (here / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return here


def record(url: str, here: Path, **options: Any) -> Any:
    return attach(url=url, prompts=here / "p.jsonl", out=here / "s.trace", **options)


@contextmanager
def impatient(route: str) -> Iterator[dict[str, float]]:
    """The client waits for an answer of `route` for moments, so that it need not be slow to be given up; with options.

    Whatever else it asks for may take as long as ever: the machine may be slow.
    """
    patience = {STATUS: "STATUS_SECONDS", START: "SEAL_SECONDS", FINISH: "SEAL_SECONDS", TRACE: "FETCH_SECONDS"}
    with pytest.MonkeyPatch.context() as patch:
        if route in patience:
            patch.setattr(remote, patience[route], 0.4)
        yield {} if route in patience else {"timeout": 0.4}


def test_a_good_server_gives_the_trace_and_is_asked_with_its_key_and_token(good: Path, here: Path) -> None:
    with serving(good_answers(good)) as (url, asked):
        assert record(url, here, api_key="user", admin_api_key="admin") == here / "s.trace"
    assert trace_files(here / "s.trace") == trace_files(good)
    assert not open_trace(here / "s.trace").verify()
    assert sorted(path.name for path in here.iterdir()) == ["p.jsonl", "s.trace"]
    keys = {name: headers["authorization"] for name, headers, _ in asked}
    assert keys.pop("POST /generate") == "Bearer user"
    assert set(keys.values()) == {"Bearer admin"}
    tokens = {name: headers.get("x-eagle-trace-token") for name, headers, _ in asked}
    assert (tokens[TRACE], tokens[FINISH], tokens[START]) == (TOKEN, TOKEN, None)
    assert asked[-1][0] == f"DELETE /eagle_trace/traces/{NAME}"


def told(**facts: Any) -> Answer:
    return says({"host": "sglang", "state": "recording", "out": PLACE, "token": TOKEN} | facts)


def sealed(**facts: Any) -> Answer:
    return says({"state": "ready", "last": {"outcome": "sealed", "requests": 1, "rows": 1} | facts})


HTTP, CHUNKED = b"HTTP/1.1 ", b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = HTTP + b"200 OK\r\n" + CHUNKED
BAD = HTTP + b"500 No\r\n" + CHUNKED
LONG_500 = HTTP + b"500 No\r\nContent-Length: 60000\r\n\r\n"
AWAY = HTTP + b"302 No\r\nLocation: x\r\n\r\n"


def nested(depth: int) -> bytes:
    return b'{"state": "ready", "last": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


ANSWERS: dict[str, tuple[str, Answer, str]] = {
    "endless status": (STATUS, endless(b" " * 4096), "answered /eagle_trace with what no armed server says"),
    "status a byte at a time": (STATUS, endless(b" ", 0.05), "did not answer /eagle_trace within"),
    "headers a byte at a time": (STATUS, drips_headers, "did not answer|cannot reach"),
    "endless header": (STATUS, lambda to: [to.wfile.write(b"A" * 4096) for _ in range(200)] and None, "cannot reach"),
    "not JSON": (STATUS, says(b"<html>hello</html>"), "no armed server"),
    "not text": (STATUS, says(b"\xff\x00\xfe"), "no armed server"),
    "nothing": (STATUS, says(b""), "no armed server"),
    "a list": (STATUS, says([1]), "no armed server"),
    "null": (STATUS, says(None), "no armed server"),
    "another state": (STATUS, says({"state": "\x1b[2Jready"}), "no state"),
    "a state that is a list": (STATUS, says({"state": ["ready"]}), "no state"),
    "NaN": (STATUS, says(b'{"state": "ready", "requests": NaN}'), "NaN is not a number"),
    "infinity": (STATUS, says(b'{"state": "ready", "requests": 1e999}'), "not finite"),
    "an endless number": (STATUS, says(b'{"state": ' + b"9" * 9999 + b"}"), "no armed server"),
    "nested deep": (STATUS, says(nested(40)), "nested too deep"),
    "nested very deep": (STATUS, says(nested(100_000)), "nested too deep"),
    "escapes in an error": (START, says({"error": "\x1b]0;x\x07\x9b31m\u202eno\nno"}, 409), "no no"),
    "a long error": (START, says({"error": "x" * 60_000}, 409), "xxx"),
    "an endless error": (START, says(b"x" * 10_000_000, 500), "answered /eagle_trace/start with 500"),
    "another server's key is wanted": (START, says({"error": "Unauthorized"}, 401), "--admin-api-key"),
    "the key goes elsewhere": (STATUS, says(b"", 302, Location="http://127.0.0.1:1/\x1b[31m"), "is not followed"),
    "an error a byte at a time": (START, raw(LONG_500, b"x", 0.05), "did not answer"),
    "a refusal a byte at a time": (START, raw(HTTP + b"401 No\r\n" + CHUNKED, b"1\r\nx\r\n", 0.05), "did not answer"),
    "elsewhere, a byte at a time": (STATUS, raw(AWAY, b"x", 0.05), "did not answer"),
    "chunks below zero": (STATUS, raw(GOOD + b"-1\r\n", bytes(1 << 16)), "cannot reach"),
    "an error in chunks below zero": (STATUS, raw(BAD + b"-1\r\n", bytes(1 << 16)), "with 500"),
    "a trace in chunks below zero": (TRACE, raw(GOOD + b"-1\r\n", bytes(1 << 16)), "it broke off"),
    "chunks of one byte": (STATUS, raw(GOOD, b"1\r\n \r\n", 0.05), "did not answer"),
    "on and on": (STATUS, raw(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01), "did not answer"),
    "millions of values": (STATUS, says(b"[" + b"[]," * 330_000 + b"1]"), "no armed server"),
    "a file instead": (STATUS, says(b"", 301, Location="file:///etc/passwd"), "is not followed"),
    "no place": (START, told(out=None), "and not what"),
    "a place above": (START, told(out="/there/.."), "no place of a trace"),
    "a place with a query": (START, told(out="/there/x?y=z"), "no place of a trace"),
    "a place with escapes": (START, told(out="/\x1b[31m/x.trace"), "no place of a trace"),
    "a place that is a number": (START, told(out=7), "no place of a trace"),
    "a place of a local file": (START, told(out="file:///etc/x.trace"), "neither a folder nor in an object store"),
    "a place on another server": (START, told(out="http://169.254.169.254/x.trace"), "neither a folder nor"),
    "a place through a chain": (START, told(out="simplecache::s3://x/y.trace"), "neither a folder nor"),
    "a place for a shell": (START, told(out="s3://x/$(reboot).trace"), "neither a folder nor"),
    "no token": (START, told(token="\r\nX: y"), "no token"),
    "a vocabulary of words": (START, told(server={"vocab_size": "many"}), "vocab_size is not a number"),
    "outcome unknown": (FINISH, says({"state": "ready", "last": {"outcome": "lost"}}), "no outcome"),
    "outcome of another type": (FINISH, says({"state": "ready", "last": [1]}), "last is not an object"),
    "sizes below zero": (FINISH, sealed(bytes=-1), "bytes is not a number"),
    "sizes of another type": (FINISH, sealed(bytes="1"), "bytes is not a number"),
    "more than the disk holds": (FINISH, sealed(bytes=10**17, files=3), "there is room for"),
    "failed, with escapes": (FINISH, sealed(outcome="failed", why="\x1b[31mno"), "no"),
    "answers that are nonsense": ("POST /generate", says(b"\x00" * 100), "no prompt was answered"),
    "answers a byte at a time": ("POST /generate", endless(b" ", 0.05), "no prompt was answered"),
    "many files": (FINISH, sealed(files=10**6), "more files than a trace has"),
    "the trace is not there": (TRACE, says({"error": "this server has no such trace"}, 404), "no such trace"),
}  # fmt: skip


def zeros(size: int, name: str = PART) -> tarfile.TarInfo:
    return member(name, b"", size=size)[0]


def sparse(size: int) -> bytes:
    """A member of a kilobyte that says it is `size` bytes (GNU's old format)."""
    info = zeros(0)
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % size
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:512]))
    return bytes(header) + bytes(1024)


def pax(**headers: str) -> bytes:
    info, data = member(PART)
    info.pax_headers = headers
    return tar_of((info, data), form=tarfile.PAX_FORMAT)


TARS: dict[str, tuple[bytes | Callable[[bytes], bytes], str]] = {
    "above": (tar_of(member("../escaped")), "not a file of a trace"),
    "far above": (tar_of(member("values/site=x/../../../../escaped")), "not a file of a trace"),
    "absolute": (tar_of(member("/tmp/escaped")), "not a file of a trace"),
    "a name of a trace, above": (tar_of(member(f"../{PART}")), "not a file of a trace"),
    "a folder above": (tar_of(member("..", b"", type=tarfile.DIRTYPE)), "not a file of a trace"),
    "a link": (tar_of(member(PART, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "not a file of a trace"),
    "a folder that is a link": (
        tar_of(member("values", b"", type=tarfile.SYMTYPE, linkname=".."), member("values/site=x/rank0-00000.parquet")),
        "not a file of a trace",
    ),
    "a hard link": (tar_of(member(PART, b"", type=tarfile.LNKTYPE, linkname="../p.jsonl")), "not a file of a trace"),
    "a pipe": (tar_of(member(PART, b"", type=tarfile.FIFOTYPE)), "not a file of a trace"),
    "a device": (tar_of(member(PART, b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5)), "not a file of a trace"),
    "a contiguous file": (tar_of(member(PART, type=tarfile.CONTTYPE)), "not a file of a trace"),
    "sparse": (sparse(8 << 30), "not a file of a trace"),
    "sparse, by an extension": (pax(**{"GNU.sparse.major": "1", "GNU.sparse.realsize": "8589934592"}), "whole trace"),
    "another size, by an extension": (pax(size="1000000"), "whole trace"),
    "another name, by an extension": (pax(path="../escaped"), "whole trace"),
    "a long extension": (tar_of(member("x", b" " * 20_000, type=tarfile.XHDTYPE)), "not a file of a trace"),
    "an extension for all": (tar_of(member("x", b"20 path=../escaped\n", type=tarfile.XGLTYPE)), "not a file"),
    "a long name": (tar_of(member("a" * 5000)), "not a file of a trace"),
    "a name with escapes": (tar_of(member("\x1b[31m")), "not a file of a trace"),
    "somebody else's file": (tar_of(member("weights.safetensors")), "not a file of a trace"),
    "twice": (tar_of(member(PART), member(PART)), "twice"),
    "a file and a folder": (tar_of(member("rows.parquet"), member(PART)), "failed"),
    "more than said": (tar_of(member(PART, b"x" * 10_000_000)), "more than it said"),
    "far more than said": (zeros(8 << 30).tobuf(tarfile.GNU_FORMAT), "more than it said"),
    "below nothing": (zeros(-512).tobuf(tarfile.GNU_FORMAT), "bytes|not a tar"),
    "many": (tar_of(*(member(f"rows.parquet/rank0-{n:05d}.parquet", b"") for n in range(3000))), "more than it said"),
    "an endless seal": (zeros(40 << 20, "manifest.json").tobuf(), "no manifest has|more than it said"),
    "not a tar": (b"no tar at all " * 1000, "not a tar"),
    "nothing": (b"", "broke off"),
    "empty": (bytes(1024), "not a whole trace"),
    "cut in a header": (lambda good: good[:700], "broke off"),
    "cut in a file": (lambda good: good[: len(good) // 2], "broke off"),
    "cut before the end": (lambda good: good[:-1024], "broke off"),
    "with a tail": (lambda good: good + b"x" * 5000, "more than a trace"),
    "a flipped bit": (lambda good: good[:2000] + bytes([good[2000] ^ 1]) + good[2001:], "not a whole trace"),
    "no seal": (lambda good: good[: good.rindex(b"manifest.json")] + bytes(1024), "not a whole trace"),
    "a hostile seal": (
        lambda good: good[: good.rindex(b"manifest.json")] + tar_of(member("manifest.json", b"[" * 100)),
        "not a whole trace",
    ),
}  # fmt: skip


def assert_harmless(answers: dict[str, Answer], here: Path, words: str, **options: Any) -> None:
    before = sorted(here.parents[1].rglob("*"))
    with serving(answers) as (url, _), pytest.raises(EagleTraceError, match=words) as refused:
        record(url, here, **options)
    sentence = str(refused.value)
    assert refused.value.exit_status == 2
    assert sentence.isprintable(), ascii(sentence)
    assert len(sentence) < 800
    assert sorted(here.parents[1].rglob("*")) == before, "nothing is left behind"


@pytest.mark.parametrize("attack", ANSWERS)
def test_answers_that_no_good_server_gives_end_in_one_sentence(attack: str, good: Path, here: Path) -> None:
    route, answer, words = ANSWERS[attack]
    answers = good_answers(good) | {route: answer}
    if not getattr(answer, "slow", False):
        assert_harmless(answers, here, words)
        return
    with impatient(route) as options:
        assert_harmless(answers, here, words, **options)


@pytest.mark.parametrize("attack", TARS)
def test_nothing_but_a_whole_trace_is_taken(attack: str, good: Path, here: Path) -> None:
    data, words = TARS[attack]
    sent = data(packed(good)) if callable(data) else data
    assert_harmless(good_answers(good) | {TRACE: says(sent)}, here, words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless(bytes(1 << 16)), "more than a trace"),
        (endless(b"x" * 1000, 0.01, head=zeros(1000).tobuf()), "not a tar|did not answer"),
        (endless(b"\1", 0.05, head=zeros(1000).tobuf()), "did not answer"),
        (endless(b"", 0.05), "did not answer"),
    ],
)
def test_a_trace_that_never_ends_is_given_up(answer: Answer, words: str, good: Path, here: Path) -> None:
    with impatient(TRACE):
        assert_harmless(good_answers(good) | {TRACE: answer}, here, words)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("part", [0.3, 0.9, 1.0])
def test_a_download_that_breaks_says_so_and_where_the_trace_is(
    part: float, chunked: bool, good: Path, here: Path
) -> None:
    whole = packed(good)
    answer = breaks_off(whole[: int(part * len(whole)) - 1], chunked=chunked)
    said = pytest.raises(RecordingError, match=f"fetching {NAME} .*it is still there.*{TOKEN}")
    with serving(good_answers(good) | {TRACE: answer}) as (url, asked), said:
        record(url, here)
    assert not any(name.startswith("DELETE") for name, *_ in asked), "the server must keep it"
    assert sorted(path.name for path in here.iterdir()) == ["p.jsonl"]


def test_an_old_trace_stays_until_the_new_one_is_whole(good: Path, here: Path) -> None:
    write_trace(here / "s.trace", Side("serve"), make_prompts(2))
    before = trace_files(here / "s.trace")
    with serving(good_answers(good) | {TRACE: says(packed(good)[:-2000])}) as (url, _), pytest.raises(RecordingError):
        record(url, here, force=True)
    assert trace_files(here / "s.trace") == before
    with serving(good_answers(good)) as (url, _):
        record(url, here, force=True)
    assert trace_files(here / "s.trace") == trace_files(good)


def test_the_files_of_an_ordinary_tar_of_a_trace_are_taken(good: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(good, arcname=".")
    out.seek(0)
    unpack(out, tmp_path, max_bytes=10**7, max_files=1000)
    assert trace_files(tmp_path) == trace_files(good)


def test_a_trace_without_rows_is_no_success_and_leaves_nothing(good: Path, here: Path) -> None:
    assert_harmless(good_answers(good) | {FINISH: sealed(rows=0, requests=0, stopped="time limit")}, here, "time limit")


def test_a_place_in_an_object_store_is_told_and_not_opened(
    good: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a place that a server names was opened")

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)
    place = f"s3://bucket/{NAME}"
    with serving(good_answers(good) | {START: told(out=place)}) as (url, _):
        assert record(url, here) == place
    assert not (here / "s.trace").exists()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://x",
        "http://",
        "http://user:secret@x",
        "http://x\n",
        "http://x:99999",
        "x",
        "http://x?y",
    ],
)
def test_only_the_address_of_a_server_is_taken(url: str, here: Path) -> None:
    with pytest.raises(UsageError, match="address"):
        record(url, here)


@pytest.mark.parametrize("key", ["sec\nret", "sec\x1bret", "s\u00e9cret", "sec ret", "secret\u2028x"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str, here: Path) -> None:
    with pytest.raises(UsageError, match="no key has") as refused:
        record("http://127.0.0.1:9", here, api_key=key)
    assert "ret" not in str(refused.value)


def test_a_key_from_a_file_may_end_its_line(good: Path, here: Path) -> None:
    with serving(good_answers(good)) as (url, asked):
        attach(url=url, prompts=here / "p.jsonl", out=here / "s.trace", api_key="user\n", timeout=float("inf"))
    assert {headers["authorization"] for _, headers, _ in asked} == {"Bearer user"}


def test_the_command_line_says_it_in_one_sentence_with_status_2_and_keeps_no_key(
    good: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = good_answers(good)
    with serving(answers | {TRACE: says(TARS["above"][0])}) as (url, asked):  # type: ignore[arg-type]
        command = ["record", "--mode", "serve", "--attach", url, "--prompts", str(here / "p.jsonl")]
        command += ["--out", str(here / "s.trace"), "--api-key", "hush", "--admin-api-key=hush", "--quiet"]
        monkeypatch.setattr(sys, "argv", ["eagle-trace", *command])
        run = CliRunner().invoke(app, command)
    assert run.exit_code == 2
    assert "not a file of a trace" in run.output
    assert "hush" not in run.output
    assert all(b"hush" not in body for _, _, body in asked)


@pytest.mark.parametrize("answer", [{}, {"state": "ready", "token": "x"}, {"state": "ready", "requests": True}])
def test_what_is_not_understood_is_refused(answer: Any) -> None:
    with pytest.raises(NonsenseError):
        understood(answer)


def test_quotes_fit_a_line_of_a_terminal() -> None:
    assert quoted("a\x1b[31m\u202e\nb\x9b" + "c" * 1000).startswith("a\\u001b[31m\\u202e b\\u009bccc")
    assert len(quoted("x" * 10_000)) == 300


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "manifest.rank12.json", "layers.parquet", PART, "values/site=layer.0.attn.q/rank3-00012.parquet"],
)
def test_names_that_a_trace_has(name: str) -> None:
    assert is_trace_file(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "manifest.json/", "./manifest.json", "x.parquet", "rows.parquet/x", "values/site=/rank0-00000.parquet",
     "values/site=../rank0-00000.parquet", "values/site=a/rank0-00000.parquet\n", "values/site=a/.rank0-00000.tmp",
     "values/site=a..b/rank0-00000.parquet", "values/site=é/rank0-00000.parquet", "rows.parquet/rank٣-00000.parquet"],
)  # fmt: skip
def test_names_that_no_trace_has(name: str) -> None:
    assert not is_trace_file(name)


def test_a_manifest_is_no_larger_than_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="which no manifest has"):
        unpack(io.BytesIO(zeros(40 << 20, "manifest.json").tobuf()), tmp_path, max_bytes=1 << 30, max_files=9)


def test_a_link_to_an_empty_folder_is_filled(good: Path, here: Path) -> None:
    (here / "real").mkdir()
    (here / "s.trace").symlink_to(here / "real")
    with serving(good_answers(good)) as (url, _):
        record(url, here)
    assert trace_files(here / "real") == trace_files(good)
    assert (here / "s.trace").is_symlink()


def test_an_archive_stops_at_what_it_may_hold(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="more than it said"):
        unpack(io.BytesIO(tar_of(member(PART, b"x" * 11))), tmp_path, max_bytes=10, max_files=1)
    assert not list(tmp_path.rglob("*.parquet"))
