"""`check hf://owner/name`: little is fetched, and a server that is not honest gets one sentence and little time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli.main import app
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_analysis.checkpoint import check as checking
from eagle_trace_analysis.checkpoint import remote
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from tests.support import checkpoints as make
from tests.support.check_cases import named, troubles
from tests.support.local_hub import NAME, NONSENSE, Hub, elapsed, local_hub
from tests.support.published_heads import eagle, flat, tensors

httpx = pytest.importorskip("httpx")
hub_rules = pytest.importorskip("eagle_trace_analysis.checkpoint.hub")
URL = f"hf://{NAME}"
SECRET = "hf_secretsecretsecret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make.write_checkpoint(tmp_path / "repository", flat(**eagle([1, 15, 28])), tensors())


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody else may see."""
    monkeypatch.setenv("HF_TOKEN", SECRET)


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a second, where nothing else will come."""
    monkeypatch.setattr(hub_rules, "QUIET_SECONDS", 1.0)
    monkeypatch.setattr(hub_rules, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(hub_rules, "SLOWEST", 1e9)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 1)


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def comparable(result: Any) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status.value, one.evidence) for one in result.findings}


def test_a_head_on_the_hub_is_judged_as_the_same_folder_is(served: Hub, folder: Path) -> None:
    there = check(URL)
    assert comparable(there) == comparable(check(folder))
    assert (there.draft, there.trainer, there.fetched) == (URL, check(folder).trainer, served.sent)
    assert there.to_dict()["fetched"] == served.sent
    assert served.tokens == {f"Bearer {SECRET}"}


def test_weights_that_no_check_needs_are_not_fetched(
    served: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "FETCHED_WHOLE", 256)
    monkeypatch.setattr(remote, "HEADER_BYTES", 4096)
    result = check(URL)
    assert not troubles(result)
    for name in ("finite", "zeros", "trained"):
        assert named(result, name).status is Status.SKIP
        assert "were not fetched" in named(result, name).evidence
    assert result.fetched == served.sent
    size = (folder / "model.safetensors").stat().st_size
    assert served.sent < size / 4, (served.sent, size)
    # what was asked of the file is its header and the norms, never the matrices
    assert not [path for path, headers in served.asked if "range" not in headers and "/resolve/" in path]


def test_a_reference_on_the_hub_is_compared_by_shape_where_values_are_not_fetched(
    served: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "FETCHED_WHOLE", 256)
    finding = named(check(folder, reference=URL), "reference")
    assert finding.status is Status.SKIP
    assert "were not fetched" in finding.evidence


def test_the_command_says_how_much_was_fetched(served: Hub) -> None:
    result = CliRunner().invoke(app, ["check", URL, "--quiet"])
    assert result.exit_code == 0, result.output
    assert "MB fetched" in result.output
    assert SECRET not in result.output


#: how a server may fail, and words of the sentence
FAULTS = {
    "silent": "did not answer in time",
    "silent later": "did not answer in time",
    "401": "keeps it from you .status 401.: is it private or gated",
    "403": "keeps it from you .status 403.",
    "404": "has no such repository, revision or file",
    "429": "answers with status 429: try again later",
    "500": "answers with status 500: try again later",
    "loop": "redirects without end",
    **dict.fromkeys(
        (f"{asked}: {body}" for asked in ("repository", "files") for body in NONSENSE),
        "cannot list hf://owner/draft: the hub's answer is not a list of files$",
    ),
    "no sizes": "lists a file of 'many' bytes",
    "null": "lists a file of None bytes",
    "negative": "lists a file of -1 bytes",
    "too small": "truncated",
    "too large": "gives .* bytes where .* were asked for",
    "whole files": "does not serve parts of a file",
    "more": "answers with .* bytes where .* are the most",
    "less": "gives .* bytes where .* were asked for",
    "endless": "sends more than the .* bytes that were asked for",
    "cut off": "cannot be reached|gives .* bytes where",
    "dripping": "is too slow",
    "compressed": "sends a compressed answer",
    "zeros": "is not JSON",
}
#: those of which no answer is ever whole
NEVER_DONE = frozenset({"silent", "silent later", "dripping"})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_not_honest_gets_one_sentence_in_a_bounded_time(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in NEVER_DONE:
        be_impatient(monkeypatch)
    start = time.monotonic()
    with local_hub(folder, fault) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=FAULTS[fault]) as caught:
            check(URL)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    # nothing is tried again
    assert elapsed(start) < 20


def test_a_redirect_to_another_server_over_http_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_hub(folder) as other, local_hub(folder, "elsewhere", other.url) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=r"redirects to 127\.0\.0\.1 over http, which is not followed"):
            check(URL)
        assert other.asked == []


def test_a_token_goes_to_the_endpoint_and_to_nobody_else() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: Any) -> Any:
        seen.append((request.url.host, request.headers.get("Authorization")))
        if request.url.host == "hub.test":
            return httpx.Response(302, headers={"Location": "https://cdn.test/weights"})
        return httpx.Response(206, content=b"weights")

    client = hub_rules.Rules("https://hub.test").client(transport=httpx.MockTransport(answer))
    headers = {"Authorization": f"Bearer {SECRET}", "Range": "bytes=0-6"}
    assert client.get("https://hub.test/file", headers=headers).content == b"weights"
    assert seen == [("hub.test", f"Bearer {SECRET}"), ("cdn.test", None)]


def test_a_file_that_is_given_whole_where_all_of_it_was_asked_for_is_taken() -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=b"weights"))
    client = hub_rules.Rules("https://hub.test").client(transport=answer)
    assert client.get("https://hub.test/file", headers={"Range": "bytes=0-6"}).content == b"weights"
    with pytest.raises(CheckpointError, match="does not serve parts"):
        client.get("https://hub.test/file", headers={"Range": "bytes=1-7"})


def test_huggingface_hub_is_left_with_the_client_it_had(served: Hub) -> None:
    from huggingface_hub.utils import _http

    before = _http._GLOBAL_CLIENT_FACTORY
    check(URL)
    assert _http._GLOBAL_CLIENT_FACTORY is before


@pytest.mark.parametrize("place", ["hf://draft", "hf://", "hf:///x"])
def test_what_is_no_repository_is_refused_by_its_form(place: str) -> None:
    with pytest.raises(UsageError, match="give hf://owner/name"):
        check(place)


def test_what_torch_saved_is_read_by_ranges_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tests.support.torch_files import as_torch

    torch.save({name: as_torch(one) for name, one in tensors().items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(remote, "HEADER_BYTES", 4096)
    with local_hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert comparable(check(URL)) == comparable(check(folder))


def test_a_repository_without_an_index_or_weights_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    with local_hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=f"{URL} has no weights"):
            check(URL)


def test_any_filesystem_of_fsspecs_will_do(folder: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/heads/one/{file.name}", file.read_bytes())
    there = check("memory://heads/one")
    assert comparable(there) == comparable(check(folder))
    assert there.fetched


def test_a_place_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(CheckpointError, match="cannot list memory://nowhere/at/all: it is not there"):
        check("memory://nowhere/at/all")


class _Ranges(SimpleHTTPRequestHandler):
    """Python's own web server, with the one part of a file that is asked for."""

    def do_GET(self) -> None:
        place, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if asked is None or not place.is_file():
            super().do_GET()
            return
        begin, end = (int(one) for one in asked.removeprefix("bytes=").split("-"))
        part = place.read_bytes()[begin : end + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{place.stat().st_size}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def test_a_folder_behind_a_web_server_is_judged_as_the_folder_is(folder: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(folder.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        there = check(f"http://127.0.0.1:{server.server_address[1]}/{folder.name}")
    finally:
        server.shutdown()
        server.server_close()
    assert comparable(there) == comparable(check(folder))
    assert there.fetched
