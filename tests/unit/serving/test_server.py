"""A server that `record` starts: what is refused before anything of it runs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_trace.demo import prompts_file
from eagle_trace.errors import HostError, Terminated, TraceUnsealedError
from eagle_trace.manifest import Manifest
from eagle_trace.store import open_store
from eagle_trace_serving import process, server
from eagle_trace_sglang.host import HOST as SGLANG
from eagle_trace_vllm.host import HOST as VLLM
from tests.support import checkpoints as make


@pytest.mark.parametrize("host", [SGLANG, VLLM], ids=lambda host: host.name)
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "has_cuda", lambda: False)
    weights, out = {"x": np.ones(1, np.float32)}, tmp_path / "gpu.trace"
    target = make.write_checkpoint(tmp_path / "target", make.decoder_config(2), weights)
    draft = make.write_checkpoint(
        tmp_path / "draft", make.decoder_config(1) | {"architectures": ["LlamaForCausalLMEagle3"]}, weights
    )
    said: list[str] = []
    with pytest.raises(HostError, match="there is no CUDA device here") as caught:
        host.record(
            target=target, draft=draft, prompts=prompts_file(), out=out, device="cuda", progress=said.append
        )  # fmt: skip
    assert "\n" not in str(caught.value)
    assert (said, out.exists(), caught.value.exit_status) == ([], False, 2)


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(there: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "has_cuda", lambda: there)
    assert server.resolve_device("auto") == device


def test_of_a_wrong_argument_the_error_is_quoted_and_not_the_usage() -> None:
    before = ["INFO: starting", "usage: launch [-h] [--model-path PATH]", "              [--port PORT]", ""]
    error = "launch: error: unrecognized arguments: --porrt 1"
    assert process._without_usage([*before, error]) == ["INFO: starting", error]
    # what only looks like it stays
    for lines in (before, [*before, "Traceback", error], ["no usage", error], []):
        assert process._without_usage(lines) == lines


def gone(*_: Any) -> Any:
    raise HostError("the server does not answer")


def hangs(*_: Any) -> Any:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("finish", "rows", "kept", "left"),
    [
        (lambda *_: None, 3, True, ["manifest.json"]),
        (lambda *_: None, 0, False, []),
        (lambda *_: None, None, False, ["manifest.json"]),
        (gone, 3, False, ["manifest.json"]),
        (hangs, 3, False, ["manifest.json"]),
    ],
)
def test_an_interruption_waits_for_the_seal_and_neither_for_a_server_that_is_gone_nor_for_one_that_hangs(
    finish: Any, rows: int | None, kept: bool, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(_path: Path) -> Any:
        if rows is None:
            raise TraceUnsealedError("not sealed")
        return SimpleNamespace(rows=[0] * rows)

    monkeypatch.setattr(server, "KEEP_SECONDS", 0.1)
    monkeypatch.setattr(server, "open_trace", opened)
    out, interrupt = tmp_path / "out", KeyboardInterrupt()
    out.mkdir()
    Manifest("serve", "values", "sglang").write(open_store(out), "manifest.json")
    asked = server.Server.__new__(server.Server)
    asked._remote = SimpleNamespace(finish=finish)  # type: ignore[assignment]
    asked._keep(out, interrupt)
    assert getattr(interrupt, "__notes__", []) == [f"what was recorded up to here is sealed in {out}"] * kept
    assert [path.name for path in out.iterdir()] == left


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated])
@pytest.mark.parametrize("place", ["start", "ask", "finish"])
def test_an_interruption_anywhere_in_a_recording_seals_what_it_has(
    place: str, kind: type[KeyboardInterrupt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str | None] = []

    def interrupted() -> None:
        raise kind

    def finish(_: object, why: str | None) -> None:
        stopped.append(why)
        if why is None:
            interrupted()

    monkeypatch.setattr(server, "open_trace", lambda _: SimpleNamespace(rows=[0]))
    monkeypatch.setattr(server, "counts_of", lambda _: {})
    asked = server.Server.__new__(server.Server)
    asked._process = SimpleNamespace(launch=SimpleNamespace(settings={}, changes=()))  # type: ignore[assignment]
    asked._progress = lambda _: None
    for name, fake in (
        ("_tokens", lambda _: []),
        ("_ask", lambda *_, **__: interrupted() if place == "ask" else None),
        ("_remote", SimpleNamespace(start=lambda _: interrupted() if place == "start" else None, finish=finish)),
    ):
        monkeypatch.setattr(asked, name, fake, raising=False)
    request = SimpleNamespace(rids=[], settings={}, prompts=[])
    with pytest.raises(kind) as caught:
        asked.record(request, tmp_path)  # type: ignore[arg-type]
    assert stopped == [None] * (place == "finish") + ["record was interrupted"]
    assert caught.value.__notes__ == [f"what was recorded up to here is sealed in {tmp_path}"]


@pytest.mark.parametrize(("kind", "waits"), [(Terminated, "TERMINATED_SECONDS"), (KeyboardInterrupt, "KEEP_SECONDS")])
def test_a_sigterm_is_waited_for_no_longer_than_a_container_gives(
    kind: type[KeyboardInterrupt], waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.TERMINATED_SECONDS < 10 < server.KEEP_SECONDS
    given: list[float] = []

    def too_late(seconds: float) -> None:
        given.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(server, "begun", lambda _: SimpleNamespace(result=too_late))
    asked, interrupt = server.Server.__new__(server.Server), kind()
    asked._keep(tmp_path, interrupt)
    assert (given, getattr(interrupt, "__notes__", [])) == ([getattr(server, waits)], [])
