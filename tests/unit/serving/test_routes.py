"""Who may do what over HTTP, through SGLang's own middleware, and what a client may send; no model is needed."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import RecordingError, UsageError
from eagle_trace.manifest import OPEN_SEAL, SEAL
from eagle_trace_serving.orders import Order
from tests.support.attached import wait_for
from tests.support.sglang_auth import sglang_auth

pytest.importorskip("httpx")
pytest.importorskip("sglang")
fastapi = pytest.importorskip("fastapi")

TOKEN = "X-Eagle-Trace-Token"
OWN = {f"eagle-trace-{'0f' * 16}-0": [0, "one"]}
GB = 10**9


class Recorder:
    """A `Control` whose recorders do as they are told: a recording is a folder with a manifest."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.orders: list[Order] = []
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.renewed = 0
        self.stopped: str | None = None

    @property
    def state(self) -> str:
        return "ready" if self.order is None else "recording"

    @property
    def recording_into(self) -> str | None:
        return None if self.order is None else self.order.out

    @property
    def last(self) -> dict[str, Any]:
        return next(reversed(self.outcomes.values()), {})

    def renew(self) -> None:
        self.renewed += 1

    def start(self, order: Order) -> None:
        if self.order is not None:
            raise UsageError(f"{self.order.out} is being recorded")
        self.order = order
        self.orders.append(order)
        make_trace(Path(order.out))

    def finish(self, settings: Any = None, stopped: str | None = None, only: str | None = None) -> None:
        if self.order is not None and only in (None, self.order.out):
            self.stopped = stopped
            self.outcomes[self.order.out] = {"out": self.order.out, "outcome": "sealed", "settings": settings}
            self.order = None

    def status(self) -> dict[str, Any]:
        return {"state": self.state, "out": self.recording_into, "last": self.last, "server": {"target": "secret"}}


def make_trace(path: Path, seal: str = SEAL) -> Path:
    path.mkdir(parents=True)
    (path / seal).write_text("{}")
    return path


class Armed:
    """An app with the routes and SGLang's middleware, and its folder, in which a trace of the server's own lies."""

    def __init__(
        self, folder: Path, auth: Any, api: str | None, admin: str | None, *, opt_in: bool, own: bool = False
    ) -> None:
        from fastapi.testclient import TestClient

        from eagle_trace_serving.access import Keys
        from eagle_trace_serving.routes import Routes, add_routes

        self.folder = folder
        self.recorder = Recorder()
        make_trace(folder / "theirs.trace")
        app = fastapi.FastAPI()
        routes = Routes(self.recorder, str(folder), Keys((api,) if api else (), admin, opt_in), 4 * GB, own=own)  # type: ignore[arg-type]
        add_routes(app, routes, auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL))
        if api or admin:
            auth.add_api_key_middleware(app, api_key=api, admin_api_key=admin)
        self.app = app
        self.client = TestClient(app, raise_server_exceptions=False)

    def ask(self, method: str, path: str, key: str | None = None, token: str | None = None, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= {TOKEN: token} if token else {}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        return self.client.request(method, f"/eagle_trace{path}", headers=headers, content=data)


Arm = Callable[..., Armed]


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arm:
    auth = sglang_auth(monkeypatch)

    def made(api: str | None = None, admin: str | None = None, *, opt_in: bool = False, own: bool = False) -> Armed:
        return Armed(tmp_path / "traces", auth, api, admin, opt_in=opt_in, own=own)

    return made


SERVERS = {
    "no key": (None, None, False),
    "no key, opted in": (None, None, True),
    "API key": ("user", None, False),
    "admin key": (None, "admin", False),
    "both keys": ("user", "admin", False),
    "both keys, opted in": ("user", "admin", True),
}
#: the keys that open everything, of each server; the others are refused
OPENS: dict[str, set[str | None]] = {
    "no key": set(),
    "no key, opted in": {None, "user", "admin", "wrong"},
    "API key": {"user"},
    "admin key": {"admin"},
    "both keys": {"admin"},
    "both keys, opted in": {"admin"},
}


@pytest.mark.parametrize("key", [None, "user", "admin", "wrong"])
@pytest.mark.parametrize("server", SERVERS)
def test_the_key_that_guards_the_servers_own_management_routes_guards_these(
    arm: Arm, server: str, key: str | None
) -> None:
    api, admin, opt_in = SERVERS[server]
    armed = arm(api, admin, opt_in=opt_in)
    started = armed.ask("POST", "/start", key, body={"requests": 3})
    told = armed.ask("GET", "", key)
    ended = armed.ask("POST", "/finish", key, body={})
    fetched = armed.ask("GET", "/traces/theirs.trace", key)
    removed = armed.ask("DELETE", "/traces/theirs.trace", key)
    statuses = [answer.status_code for answer in (started, told, ended, fetched, removed)]
    if key in OPENS[server]:
        assert statuses == [200] * 5
        assert "server" in told.json()
        assert not (armed.folder / "theirs.trace").exists()
        return
    # a server without a key knows nobody: it says its state, and records nobody's requests
    assert statuses == ([403, 200, 403, 404, 404] if server == "no key" else [401] * 5)
    assert not armed.recorder.orders
    assert (armed.folder / "theirs.trace").exists()
    assert all(
        "secret" not in answer.text and "theirs" not in answer.text for answer in (started, told, ended, fetched)
    )


def test_without_a_key_only_ids_that_nobody_else_can_guess_are_recorded(arm: Arm) -> None:
    armed = arm()
    digits = "0f" * 16
    for named in ({"1": [0, "k"]}, {"chat-7": [0, "k"]}, {"eagle-trace-1": [0, "k"]}, OWN | {"2": [1, "k"]},
                  {f"eagle-trace-{digits}": [0, "k"]}, {f"eagle-trace-{digits[:-1]}-0": [0, "k"]}):  # fmt: skip
        refused = armed.ask("POST", "/start", body={"named": named})
        assert refused.status_code == 403, named
        assert "EAGLE_TRACE_RECORD_OTHERS=1" in refused.json()["error"]
    started = armed.ask("POST", "/start", body={"named": OWN, "seconds": 86_000})
    assert started.status_code == 200
    assert armed.recorder.orders[0].admission.named == {rid: tuple(one) for rid, one in OWN.items()}
    assert armed.recorder.orders[0].seconds == 3600, "others want to record too"


def test_the_token_opens_the_recording_that_was_started_with_it_and_no_other(arm: Arm) -> None:
    armed = arm()
    first = armed.ask("POST", "/start", body={"named": OWN}).json()
    name = first["out"].rpartition("/")[2]
    for token in (None, "guess", first["token"][:-1], first["token"] + "x"):
        assert armed.ask("GET", "", token=token).json() == {"state": "recording"}
        assert armed.ask("POST", "/finish", token=token, body={}).status_code == 403
        assert armed.ask("GET", f"/traces/{name}", token=token).status_code == 404
    assert armed.recorder.renewed == 0, "a lease belongs to whoever started it"
    assert armed.ask("GET", "", token=first["token"]).json()["out"] == first["out"]
    assert armed.recorder.renewed == 1
    being_recorded = armed.ask("DELETE", f"/traces/{name}", token=first["token"])
    assert (being_recorded.status_code, "is being recorded" in being_recorded.text) == (409, True)
    ended = armed.ask("POST", "/finish", token=first["token"], body={})
    assert ended.json()["last"]["out"] == first["out"]
    # somebody else's recording is neither seen nor ended by it, and the outcome of its own is still told
    renewed = armed.recorder.renewed
    second = armed.ask("POST", "/start", body={"named": OWN}).json()
    assert armed.ask("GET", "", token=first["token"]).json()["state"] == "ready"
    assert second["out"] not in armed.ask("GET", "", token=first["token"]).text
    assert armed.ask("POST", "/finish", token=first["token"], body={}).json()["last"]["out"] == first["out"]
    assert armed.recorder.recording_into == second["out"]
    assert armed.recorder.renewed == renewed
    assert armed.ask("GET", "/traces/theirs.trace", token=first["token"]).status_code == 404
    assert armed.ask("GET", f"/traces/{name}", token=second["token"]).status_code == 404
    assert armed.ask("GET", f"/traces/{name}", token=first["token"]).status_code == 200
    assert armed.ask("DELETE", f"/traces/{name}", token=first["token"]).status_code == 200
    assert not Path(first["out"]).exists()


def test_clients_without_a_key_cannot_fill_the_disk_with_traces(arm: Arm) -> None:
    armed = arm()
    outs = []
    for _ in range(8):
        started = armed.ask("POST", "/start", body={"named": OWN}).json()
        outs.append((started["out"].rpartition("/")[2], started["token"]))
        armed.ask("POST", "/finish", token=started["token"], body={})
    assert "takes no more" in armed.ask("POST", "/start", body={"named": OWN}).json()["error"]
    name, token = outs[3]
    assert armed.ask("DELETE", f"/traces/{name}", token=token).status_code == 200
    assert armed.ask("POST", "/start", body={"named": OWN}).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


MANY = {f"r-{number}": [number, "k"] for number in range(10_001)}
BODIES: list[tuple[Any, int]] = [
    (b"[" * 100_000, 422),
    (b'{"settings": ' + b'{"a":' * 900 + b"1" + b"}" * 901, 422),
    ({"settings": nested(900)}, 422),
    ({"settings": nested(40)}, 422),
    (b"\xff\xfe", 422),
    (b"not json", 422),
    (b'{"match": "\\ud800"}', 422),
    (b'{"named": {"\\uDfff": [0, "k"]}}', 422),
    (b'{"\\ud800": 1}', 422),
    (b"[]", 422),
    (b'"text"', 422),
    (b'{"requests": NaN}', 422),
    (b'{"sample": 1e999}', 422),
    (b'{"requests": ' + b"9" * 5000 + b"}", 422),
    (b" " * (2 << 20) + b" {}", 413),
    ({"argv": ["x" * 5000]}, 422),
    ({"argv": ["x"] * 5000}, 422),
    ({"requests": 10**30}, 422),
    ({"requests": 0}, 422),
    ({"requests": -1}, 422),
    ({"requests": "many"}, 422),
    ({"sample": 0}, 422),
    ({"seconds": 1e18}, 422),
    ({"seconds": -1}, 422),
    ({"level": "everything"}, 422),
    ({"match": "a" * 300}, 422),
    ({"max_bytes": "5GB"}, 409),
    ({"max_bytes": "-1"}, 409),
    ({"max_bytes": "nanGB"}, 409),
    ({"max_bytes": "x" * 1000}, 422),
    ({"sites": ",".join(["fc.*"] * 101)}, 409),
    ({"sites": "fc." + "*" * 200}, 409),
    ({"sites": "fc.*," * 100_000}, 422),
    ({"sites": "\x1b[31m"}, 409),
    ({"roots": "0:1," * 100_000}, 422),
    ({"roots": "1," * 1001}, 409),
    ({"roots": "9" * 4400}, 409),
    ({"steps": "3:1"}, 409),
    ({"named": {}}, 422),
    ({"named": MANY}, 422),
    ({"named": {"r" * 300: [0, "k"]}}, 422),
    ({"named": {"r": [2**40, "k"]}}, 422),
    ({"named": {"r": [-1, "k"]}}, 422),
    ({"named": {"r": [0, "k" * 2000]}}, 422),
    ({"named": {"r": [0, "k"], "s": [0, "l"]}}, 409),
    ({"named": ["r"]}, 422),
    ({"settings": {"temperature": "hot"}}, 422),
    ({"settings": {"note": "x" * (64 << 10)}}, 422),
    (b'{"settings": {"x": [' + b"[]," * 660_000 + b"1]}}", 422),
    (b'{"settings": {"x": [' + (b"[" * 28 + b"]" * 28 + b",") * 36_000 + b"1]}}", 422),
    ({"requests": True}, 422),
    ({"requests": "3"}, 422),
    ({"sample": True}, 422),
    ({"sample": "0.5"}, 422),
    ({"seconds": True}, 422),
    ({"keep_cuda_graphs": 1}, 422),
    ({"keep_cuda_graphs": "yes"}, 422),
    ({"named": {"r": [True, "k"]}}, 422),
    ({"named": {"r": ["1", "k"]}}, 422),
    ({"named": {"r": [0.5, "k"]}}, 422),
    ({"settings": {"max_new_tokens": True}}, 422),
    ({"settings": {"temperature": True}}, 422),
    ({"nonsense": 1}, 422),
]


@pytest.mark.parametrize(("body", "status"), BODIES)
def test_a_body_that_makes_no_sense_is_refused_with_one_sentence_before_anything_starts(
    arm: Arm, body: Any, status: int
) -> None:
    armed = arm(admin="admin")
    began = time.process_time()
    refused = armed.ask("POST", "/start", "admin", body=body)
    assert refused.status_code == status, refused.text[:500]
    sentence = refused.json()["error"]
    assert len(sentence) < 700
    assert "\n" not in sentence
    assert not armed.recorder.orders
    assert armed.recorder.state == "ready"
    assert time.process_time() - began < 5


def test_what_a_client_says_does_not_take_the_name_of_what_the_server_knows(arm: Arm) -> None:
    armed = arm(admin="admin")
    said = {"steps": 99, "features": "serve", "sglang_args": ["x"], "temperature": 0.5, "max_new_tokens": 4}
    armed.ask("POST", "/start", "admin", body={"settings": said, "argv": ["record", "--api-key", "admin"]})
    order = armed.recorder.orders[0]
    assert dict(order.settings) == {
        "temperature": 0.5,
        "max_new_tokens": 4,
        "client": {"steps": 99, "features": "serve", "sglang_args": ["x"]},
    }
    assert order.argv == ("record", "--api-key", "***")
    assert not order.keep_empty


def test_why_a_recording_ended_is_text_for_one_line(arm: Arm) -> None:
    armed = arm(admin="admin")
    for stopped, kept in (("\x1b[2J\nno", "\\u001b[2J no"), (None, None), ("caf\u00e9", "caf\u00e9")):
        armed.ask("POST", "/start", "admin", body={})
        assert armed.ask("POST", "/finish", "admin", body={"stopped": stopped}).status_code == 200
        assert armed.recorder.stopped == kept
    for body in (
        b'{"stopped": "\\ud800"}',
        {"stopped": "x" * 501},
        {"settings": {"server_counts": {"r": "x"}}},
        {"settings": nested(900)},
        [1],
    ):
        assert armed.ask("POST", "/finish", "admin", body=body).status_code == 422


@pytest.mark.parametrize(("asked", "kept"), [(None, 4 * GB), ("1GB", GB), ("4GB", 4 * GB)])
def test_a_client_may_ask_for_less_than_the_server_keeps(arm: Arm, asked: str | None, kept: int) -> None:
    armed = arm(admin="admin")
    assert armed.ask("POST", "/start", "admin", body={"max_bytes": asked}).status_code == 200
    assert armed.recorder.orders[0].max_bytes == kept


@pytest.fixture
def crowded(arm: Arm, tmp_path: Path) -> Armed:
    """A folder with a trace, one being recorded, somebody's models beside and inside, and a link to a trace."""
    armed = arm(admin="admin")
    make_trace(armed.folder / "open.trace", OPEN_SEAL)
    for models in (tmp_path / "models", armed.folder / "models"):
        models.mkdir()
        (models / "weights").write_text("precious")
    (tmp_path / SEAL).write_text("{}")
    (armed.folder / "link.trace").symlink_to(armed.folder / "theirs.trace")
    armed.recorder.order = Order(str(armed.folder / "open.trace"))
    return armed


@pytest.mark.parametrize("name", ["%2e%2e", "%2e", "models", "link.trace", "absent.trace", "..%2fmodels", "%00"])
def test_nothing_but_traces_is_given_away_or_removed(crowded: Armed, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for method in ("GET", "DELETE"):
        answer = crowded.ask(method, f"/traces/{name}", "admin")
        assert answer.status_code == 404, (method, answer.status_code)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_is_removed_once_it_is_not_recorded_any_more(crowded: Armed) -> None:
    refused = crowded.ask("DELETE", "/traces/open.trace", "admin")
    assert refused.status_code == 409
    assert "is being recorded" in refused.json()["error"]
    assert crowded.ask("DELETE", "/traces/theirs.trace", "admin").status_code == 200
    assert sorted(path.name for path in crowded.folder.iterdir()) == ["link.trace", "models", "open.trace"]


def test_what_lies_in_a_trace_and_is_not_part_of_it_is_not_given_away(arm: Arm, tmp_path: Path) -> None:
    armed = arm(admin="admin")
    trace = armed.folder / "theirs.trace"
    (tmp_path / "secret").write_text("secret")
    (trace / "notes.txt").write_text("secret")
    (trace / "rows.parquet").symlink_to(tmp_path / "secret")
    (trace / "values").symlink_to(tmp_path)
    (trace / "topk.parquet").mkdir()
    (trace / "topk.parquet" / "rank0-00000.parquet").write_bytes(b"x" * 1000)
    answer = armed.ask("GET", "/traces/theirs.trace", "admin")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        names = archive.getnames()
    assert names == ["topk.parquet/rank0-00000.parquet", SEAL], "the seal comes last"
    assert b"secret" not in answer.content


def test_a_file_that_shrinks_while_it_is_sent_breaks_the_answer(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_trace_serving import archive

    armed = arm(admin="admin")
    monkeypatch.setattr(archive, "trace_files", lambda _path: {SEAL: 5000})
    with pytest.raises(OSError, match="changed while it was sent"):
        b"".join(archive.pack(armed.folder / "theirs.trace")[1])


def test_a_download_that_breaks_on_the_server_does_not_end_like_a_regular_one(
    arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real connection: the server's file turns out shorter than it was when the answer began."""
    uvicorn = pytest.importorskip("uvicorn")
    from eagle_trace_serving import archive, routes
    from eagle_trace_serving.answers import Ended
    from eagle_trace_serving.remote import Remote

    armed = arm("user")
    part = armed.folder / "theirs.trace" / "topk.parquet" / "rank0-00000.parquet"
    part.parent.mkdir()
    part.write_bytes(bytes(3 << 20))

    def truncated(path: Path) -> Any:
        length, blocks = archive.pack(path)

        def cut() -> Iterator[bytes]:
            yield next(blocks)
            yield next(blocks)
            os.truncate(part, 1 << 20)
            yield from blocks

        return length, cut()

    monkeypatch.setattr(routes, "pack", truncated)
    server = uvicorn.Server(uvicorn.Config(armed.app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        remote = Remote(f"http://127.0.0.1:{port}", "user")
        with pytest.raises(RecordingError, match=r"fetching theirs.trace .*broke off.*still there"):
            remote.fetch("theirs.trace", Ended(bytes=4 << 20, files=2), tmp_path)
    finally:
        server.should_exit = True
        thread.join()
    assert part.exists()


def test_a_prompt_may_not_have_two_numbers_and_no_number_is_endless() -> None:
    from eagle_trace_serving.admission import Admission

    with pytest.raises(UsageError, match="a number of its own"):
        Admission({"a": (0, "k"), "b": (0, "l")})
    with pytest.raises(UsageError, match="at most"):
        Admission(requests=10**30)
    with pytest.raises(UsageError, match="time limit"):
        Order("x", seconds=math.inf)


PAGES = [{"Origin": "http://page.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
         {"Sec-Fetch-Site": "same-origin"}]  # fmt: skip


@pytest.mark.parametrize("headers", PAGES)
def test_a_page_in_a_browser_reaches_no_server_that_has_no_key(arm: Arm, headers: dict[str, str]) -> None:
    armed = arm(opt_in=True)
    asked = [("GET", ""), ("POST", "/start"), ("POST", "/finish"), ("GET", "/traces/theirs.trace"),
             ("DELETE", "/traces/theirs.trace")]  # fmt: skip
    for method, path in asked:
        refused = armed.client.request(method, f"/eagle_trace{path}", headers=headers)
        assert refused.status_code == 403, path
        assert "browser" in refused.json()["error"]
    assert not armed.recorder.orders
    assert (armed.folder / "theirs.trace").exists()


def test_the_name_of_a_host_opens_nothing(arm: Arm) -> None:
    """SGLang lets addresses of its health routes pass, and reads the address off a header of the client's."""
    armed = arm("user", "admin")
    for host in ("x/health", "x/health?", "x/metrics#", "x/ready"):
        for method, path in (("GET", ""), ("POST", "/start"), ("POST", "/finish"), ("DELETE", "/traces/theirs.trace")):
            assert armed.client.request(method, f"/eagle_trace{path}", headers={"Host": host}).status_code == 401
    assert not armed.recorder.orders
    assert (armed.folder / "theirs.trace").exists()


def test_without_a_key_nobody_learns_what_others_record(arm: Arm) -> None:
    armed = arm()
    place = armed.ask("POST", "/start", body={"named": OWN}).json()["out"]
    refused = armed.ask("POST", "/start", body={"named": OWN})
    assert refused.status_code == 409
    assert Path(place).name not in refused.text


def test_clients_without_a_key_cannot_start_as_often_as_they_like(arm: Arm) -> None:
    armed = arm()
    statuses = []
    for _ in range(25):
        started = armed.ask("POST", "/start", body={"named": OWN})
        statuses.append(started.status_code)
        if started.status_code == 200:
            token = started.json()["token"]
            armed.ask("POST", "/finish", token=token, body={})
            armed.ask("DELETE", f"/traces/{Path(started.json()['out']).name}", token=token)
    assert statuses[:20] == [200] * 20
    assert 429 in statuses[20:]


@contextmanager
def served(app: Any) -> Iterator[int]:
    """The port of a real server."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive(), "nothing keeps it from ending"


def test_a_disk_that_hangs_while_traces_are_removed_leaves_the_other_routes_alone(
    arm: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from eagle_trace_serving import routes

    armed = arm("user")
    moves = threading.Event()
    monkeypatch.setattr(routes.shutil, "rmtree", lambda _path: moves.wait())
    with served(armed.app) as port, ExitStack() as stack:
        stack.callback(moves.set)
        key = {"Authorization": "Bearer user"}
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=60))
        with monkeypatch.context() as patched:
            patched.setattr(routes, "FOLDER_SECONDS", 0.1)
            told = [client.delete("/eagle_trace/traces/theirs.trace") for _ in range(routes.WORKERS + 1)]
        assert {answer.status_code for answer in told} == {409}
        assert "did not answer within" in told[0].json()["error"]
        assert "earlier attempts still wait" in told[-1].json()["error"]
        assert client.get("/eagle_trace").json()["state"] == "ready"
        assert client.post("/eagle_trace/start", json={}).status_code == 200


def test_slow_bodies_and_slow_downloads_keep_nobody_out(arm: Arm) -> None:
    import httpx

    from eagle_trace_serving import routes

    armed = arm(opt_in=True)
    part = armed.folder / "theirs.trace" / "topk.parquet" / "rank0-00000.parquet"
    part.parent.mkdir()
    part.write_bytes(bytes(20 << 20))
    handles = len(list(Path("/proc/self/fd").iterdir()))
    with served(armed.app) as port, ExitStack() as stack:

        def begin(words: bytes) -> None:
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            one.sendall(words)

        for _ in range(routes.MOST_READ + 1):
            begin(b"POST /eagle_trace/start HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        for _ in range(routes.MOST_SENT):
            begin(b"GET /eagle_trace/traces/theirs.trace HTTP/1.1\r\nHost: x\r\n\r\n")
        address = f"http://127.0.0.1:{port}/eagle_trace"

        def fetched() -> int:
            return httpx.get(f"{address}/traces/theirs.trace", timeout=60).status_code

        wait_for(lambda: fetched() == 429, lambda: "the slow downloads do not count")
        assert httpx.post(f"{address}/start", json={}, timeout=60).status_code == 200
        stack.close()
        wait_for(lambda: fetched() == 200, lambda: "what is over still counts")
    # the last of a download's handles goes with its generator, when the server's thread gets to it
    wait_for(lambda: len(list(Path("/proc/self/fd").iterdir())) <= handles + 2, lambda: "handles are left open")


# ---- a server that `record` started ---------------------------------------------------------------------------------


def own_body(out: Path, **more: Any) -> dict[str, Any]:
    return {"out": str(out), "named": {f"r{number}": [number, "key"] for number in range(20_000)}} | more


def test_who_started_a_server_says_where_a_trace_goes_and_may_record_any_number_of_prompts(
    arm: Arm, tmp_path: Path
) -> None:
    armed = arm(api="user", own=True)
    more = {"started": {"seed": 0}, "changes": ["no graphs"], "max_bytes": str(100 * GB), "settings": {"batch_size": 2}}
    began = armed.ask("POST", "/start", "user", body=own_body(tmp_path / "here", **more))
    assert began.json()["out"] == str(tmp_path / "here")
    (order,) = armed.recorder.orders
    assert (order.max_bytes, order.lease, order.alone, order.keep_empty) == (100 * GB, None, False, True)
    assert order.settings == {"batch_size": 2, "seed": 0}
    assert order.changes == ("no graphs",)
    counts = {f"r{number}": {"spec_verify_ct": 1} for number in range(20_000)}
    assert armed.ask("POST", "/finish", "user", body={"settings": {"server_counts": counts}}).status_code == 200
    assert armed.recorder.last["settings"]["server_counts"] == counts


@pytest.mark.parametrize(("own", "key"), [(True, None), (True, "wrong"), (False, "user")])
def test_nobody_else_says_where_a_trace_goes(arm: Arm, tmp_path: Path, own: bool, key: str | None) -> None:
    armed = arm(api="user", own=own)
    body = {"out": str(tmp_path / "here"), "named": OWN}
    assert armed.ask("POST", "/start", key, body=body).status_code in (401, 403, 422)
    assert not armed.recorder.orders
    assert not (tmp_path / "here").exists()
