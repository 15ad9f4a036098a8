"""Recording in a server that its user started, in every way it batches. Each server is started once."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.errors import HostError, PromptsError, RecordingError
from eagle_trace.manifest import OPEN_SEAL
from eagle_trace.selection import Selection
from eagle_trace_analysis import diff
from eagle_trace_serving.record import attach
from tests.support.attached import Attached, server, wait_for
from tests.support.pairs import TARGET
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

Train = Callable[..., Trace]

TEXTS = [
    "The return statement ends a function and ",
    "A for loop goes over ",
    "The import statement finds a module, loads it, and binds its name in the namespace of the statement; ",
    "def ",
    "An exception that is raised in the body of a function leaves it at once, and the caller sees ",
    "The name of a class is ",
]
#: tokens of an answer that is not waited for: nearly all that the model has room for
LONG = 900


@pytest.fixture(scope="module")
def chain(folder: Path, deployed: Path) -> Iterator[Attached]:
    """A chain of three draft steps, prefix cache and chunked prefill on, and both of SGLang's keys; records its first
    two requests by itself."""
    place = folder / "chain"
    place.mkdir()
    arguments = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--chunked-prefill-size", "32"]
    keys = {"api_key": "user", "admin_api_key": "admin"}
    with server(place, TARGET, deployed, *arguments, **keys, EAGLE_TRACE_REQUESTS="2") as running:
        running.wait_until("recording")  # it serves before, if that takes long
        yield running


@pytest.fixture
def idle(chain: Attached) -> Attached:
    """The chain, done with what it records by itself."""
    if chain.status["state"] == "recording":
        chain.post("/eagle_trace/finish", {})
    return chain


@pytest.fixture(scope="module")
def tree(folder: Path, deployed: Path, warm: Warm) -> Iterator[Attached]:
    """A tree of four branches, eight tokens verified, in bf16; it has no key, and waits to be told."""
    place = folder / "tree"
    place.mkdir()
    arguments = ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8", "--disable-radix-cache"]
    with warm(), server(place, TARGET, deployed, *arguments, dtype="bfloat16", EAGLE_TRACE_REQUESTS="0") as running:
        yield running


def status_of(act: Callable[[], object]) -> int:
    """Status of what a server refuses."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        act()
    return refused.value.code


def write_prompts(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def assert_healthy(train: Train, serve: Trace) -> None:
    result = diff(train(replay=serve.path), serve)
    assert result.exit_status == 0, result
    assert not result.coverage.unmatched_serve


def ask_many(running: Attached, name: str, tokens: list[int], **sampling: Any) -> list[Any]:
    """Ask half of it at once and half when the first answer has begun, each for another number of tokens.

    So requests join and leave a running batch, however fast the machine is.
    """

    first = threading.Event()

    def ask(number: int) -> Any:
        text = TEXTS[number % len(TEXTS)] * (1 + number % 3)
        if number % 2:  # joins while others are answered
            assert first.wait(300)
        begun = first.set if number == 0 else None
        return running.generate(text, f"{name}-{number}", tokens[number], begun=begun, **sampling)

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(ask, range(len(tokens))))


def test_it_records_the_next_requests_by_itself_then_seals(chain: Attached, train: Train) -> None:
    status = chain.status
    assert status["state"] == "recording"
    while_recording = [chain.generate(TEXTS[0])["text"], chain.generate(TEXTS[1])["text"]]
    chain.wait_until("ready")
    assert [chain.generate(text)["text"] for text in TEXTS[:2]] == while_recording
    trace = open_trace(status["out"])
    assert chain.traces == [Path(trace.path)]
    assert len(trace.prompts) == 2
    assert trace.manifest.stopped is None
    assert_healthy(train, trace)


def test_keys_open_what_they_open_elsewhere_in_the_server(idle: Attached, tmp_path: Path) -> None:
    chain = idle
    chain.post("/eagle_trace/start", {"requests": 1})
    chain.generate(TEXTS[5])
    chain.wait_until("ready")
    before = chain.traces
    mine = before[0]
    for key in ("", "Bearer user", "Bearer wrong"):
        for method, path in (("GET", ""), ("GET", f"/traces/{mine.name}"), ("DELETE", f"/traces/{mine.name}")):
            assert status_of(lambda: chain.ask(method, f"/eagle_trace{path}", Authorization=key)) == 401  # noqa: B023
        for path in ("start", "finish"):
            assert status_of(lambda: chain.ask("POST", f"/eagle_trace/{path}", {}, Authorization=key)) == 401  # noqa: B023
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "A"})
    with pytest.raises(HostError, match="--admin-api-key"):
        attach(url=chain.url, api_key="user", prompts=prompts, out=tmp_path / "s.trace")
    with pytest.raises(HostError, match="wants its API key for /generate: --api-key"):
        attach(url=chain.url, api_key="admin", prompts=prompts, out=tmp_path / "s.trace")
    assert chain.status["state"] == "ready"
    assert chain.traces == before, "what nobody was recorded in is not kept"
    assert b"Traceback" not in chain.log.read_bytes()


def test_prompts_are_sent_and_the_trace_fetched(idle: Attached, train: Train, tmp_path: Path) -> None:
    before = idle.traces
    messages = [{"role": "user", "content": "What does return do?"}]
    prompts = write_prompts(
        tmp_path / "p.jsonl",
        {"prompt": TEXTS[2]},
        {"prompt": TEXTS[2] + "always"},
        {"id": "ids", "input_ids": list(b"while True: ")},
        {"id": "chat", "messages": messages},
    )
    attach(**idle.reach, prompts=prompts, out=tmp_path / "s.trace", max_new_tokens=16, batch_size=1)
    trace = open_trace(tmp_path / "s.trace")
    assert idle.traces == before, "it was fetched, so the server need not keep it"
    keys = dict(zip(trace.prompts.prompt_key, trace.prompts.index, strict=True))
    assert {"ids", "chat"} <= set(keys)
    assert (trace.calls["mode"] == "EXTEND").sum() > len(trace.prompts), "long prompts are prefilled in chunks"
    # the server applied its own chat template: the tokens are there to compare with those of training
    chat = trace.prompts.loc[keys["chat"]]
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(TARGET).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert list(chat.token_ids[: chat.num_prompt_tokens]) == list(template)
    # the second prompt began like the first: its first positions were not computed, and the trace says so
    second = trace.prompts.loc[trace.prompts.prompt_id == 1].iloc[0]
    assert second.cached_tokens > 0
    assert trace.rows.root[trace.rows.prompt_id == 1].min() == second.cached_tokens
    assert any("prefix cache" in entry["why"] for entry in trace.manifest.not_materialised)
    assert_healthy(train, trace)


def test_requests_join_and_leave_and_others_are_left_alone(idle: Attached, train: Train) -> None:
    out = idle.post("/eagle_trace/start", {"requests": 8, "match": "mixed-*"})["out"]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask_many, idle, "other", [20, 9, 14, 5])
        mixed = pool.submit(ask_many, idle, "mixed", [30, 3, 17, 8, 25, 1, 12, 21])
        recorded, _ = mixed.result(), other.result()
    idle.wait_until("ready")
    trace = open_trace(out)
    assert {rid.split("-")[0] for rid in trace.prompts.request_id} == {"mixed"}
    assert trace.calls.batch_size.max() > 2
    again = ask_many(idle, "again", [30, 3, 17, 8, 25, 1, 12, 21])
    assert [one["text"] for one in recorded] == [one["text"] for one in again]
    assert_healthy(train, trace)


def test_sampled_answers_agree_too(idle: Attached, train: Train, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *({"prompt": text} for text in TEXTS[:4]))
    attach(**idle.reach, prompts=prompts, out=tmp_path / "s.trace", max_new_tokens=24, temperature=0.9)
    trace = open_trace(tmp_path / "s.trace")
    assert trace.manifest.settings["temperature"] == 0.9
    assert_healthy(train, trace)


def counted(running: Attached) -> tuple[int, int] | None:
    """How many requests were recorded, and ended, so far; None if none is recorded any more."""
    found: list[Any] = []

    def told() -> bool:
        found[:] = [running.status]
        # a recorder that has much else to do may be too late to be heard
        return found[0]["state"] != "recording" or "ended" in found[0]

    wait_for(told, lambda: found)
    return (found[0]["requests"], found[0]["ended"]) if found[0]["state"] == "recording" else None


def test_an_aborted_request_is_kept_up_to_there(idle: Attached, train: Train) -> None:
    out = idle.post("/eagle_trace/start", {"requests": 2, "match": "abort-*"})["out"]
    idle.generate(TEXTS[1], "abort-short", 10)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(idle.generate, TEXTS[0], "abort-long", LONG, ignore_eos=True, begun=begun.set)
        assert begun.wait(300)
        with idle.paused():
            assert counted(idle) == (2, 1), "it is being answered"
            idle.post("/abort_request", {"rid": "abort-long"})
        long.result()
    idle.wait_until("ready")
    trace = open_trace(out)
    reasons = dict(zip(trace.prompts.request_id, trace.prompts.finish_reason, strict=True))
    assert reasons["abort-long"] == "abort"
    assert any("aborted" in warning for warning in trace.manifest.warnings)
    assert_healthy(train, trace)


def test_a_request_that_does_not_end_is_given_up_and_the_others_kept(idle: Attached, train: Train) -> None:
    # the limit must not pass before both are recorded, which takes a slow machine longer
    path = next(found for seconds in (1.0, 5.0, 25.0, 125.0) if (found := given_up(idle, seconds)))
    trace = open_trace(path)
    assert trace.prompts.request_id.tolist() == ["slow-short", "slow-long"]
    assert trace.prompts.finish_reason.isna().tolist() == [False, True]
    assert_healthy(train, trace)


def given_up(running: Attached, seconds: float) -> str | None:
    """The trace of a request that was answered, and of one that was held until a time limit had passed.

    None if the limit passed before there were two, or the answer was whole before it was held.
    """
    out = str(running.post("/eagle_trace/start", {"requests": 2, "match": "slow-*", "seconds": seconds})["out"])
    running.generate(TEXTS[1], "slow-short", 10, ignore_eos=True)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(running.generate, TEXTS[0], "slow-long", LONG, ignore_eos=True, begun=begun.set)
        assert begun.wait(300)
        with running.paused():
            held = counted(running) == (2, 1)
            running.wait_until("ready")
            assert not held or running.status["last"]["stopped"] == f"time limit ({seconds:g} s)"
            running.post("/abort_request", {"rid": "slow-long"})
        long.result()
    return out if held else None


def test_the_selection_keeps_what_was_chosen_and_every_shape(idle: Attached, tmp_path: Path) -> None:
    # texts of their own, so that no position comes from the prefix cache
    texts = ["Zero or more of these", "One at a time, please", "Two of a kind are there"]
    prompts = write_prompts(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    selection = Selection.parse(sites="fc.*,logits", roots="5:24", steps="0:2", prompts="0,2")
    attach(**idle.reach, prompts=prompts, out=tmp_path / "s.trace", max_new_tokens=8, selection=selection)
    trace = open_trace(tmp_path / "s.trace")
    assert trace.sites == ["fc.in", "fc.out", "logits"]
    assert "layer.0.mlp.act" in trace.shapes
    assert set(trace.rows.root.tolist()) <= set(range(5, 24))
    assert set(trace.rows.step.tolist()) <= {0, 1}
    assert len(trace.prompts) == 2


def test_an_id_that_is_no_text_ends_nobodys_recording(idle: Attached) -> None:
    out = Path(idle.post("/eagle_trace/start", {"requests": 2})["out"])
    for rid in ("\ud800", "x" * 2000, 5, None, ["y"]):
        with contextlib.suppress(urllib.error.HTTPError, OSError):  # as SGLang likes
            sampling = {"max_new_tokens": 4, "temperature": 0}
            idle.post("/generate", {"text": "A", "rid": rid, "sampling_params": sampling}, timeout=30)
    assert idle.status["last"].get("outcome") != "failed"
    if idle.status["state"] == "recording":
        idle.generate("The", "plain-1", 4)
        idle.post("/eagle_trace/finish", {})
    assert idle.status["last"]["outcome"] == "sealed", idle.status["last"]
    assert all(open_trace(out).prompts["request_id"].map(str.isprintable))


def test_what_cannot_be_done_is_said(idle: Attached, tmp_path: Path) -> None:
    idle.post("/eagle_trace/start", {"requests": 1, "match": "nobody"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        idle.post("/eagle_trace/start", {"requests": 1})
    assert "is being recorded" in json.loads(refused.value.read())["error"]
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "A"})
    with pytest.raises(RecordingError, match="is being recorded"):
        attach(**idle.reach, prompts=prompts, out=tmp_path / "s.trace")
    assert not (tmp_path / "s.trace").exists()
    before = len(idle.traces)
    ended = idle.post("/eagle_trace/finish", {})["last"]
    assert ended["stopped"] == "told to stop"
    assert ended["removed"], "nobody came, so nothing is kept"
    assert len(idle.traces) == before - 1
    # these would not be refused by SGLang, but end it
    foreign = write_prompts(tmp_path / "f.jsonl", {"input_ids": [999999]})
    with pytest.raises(PromptsError, match="the target's vocabulary ends at"):
        attach(**idle.reach, prompts=foreign, out=tmp_path / "f.trace")
    endless = {"prompt": "a" * 3000}
    with pytest.raises(PromptsError, match="answered /generate with 400"):
        attach(**idle.reach, prompts=write_prompts(tmp_path / "q.jsonl", endless), out=tmp_path / "q.trace")
    # one that is refused does not cost the others
    prompts = write_prompts(tmp_path / "o.jsonl", {"prompt": "One of two"}, endless)
    attach(**idle.reach, prompts=prompts, out=tmp_path / "o.trace", max_new_tokens=8)
    trace = open_trace(tmp_path / "o.trace")
    assert len(trace.prompts) == 1
    assert "1 of 2 prompts were not answered" in str(trace.manifest.stopped)
    with pytest.raises(HostError, match="cannot reach"):
        attach(url="http://127.0.0.1:9", prompts=prompts, out=tmp_path / "r.trace")


def test_a_tree_in_bf16_with_requests_that_join_and_leave(tree: Attached, train: Train, tmp_path: Path) -> None:
    assert tree.status["state"] == "ready", "told to wait"
    assert not tree.traces
    before = ask_many(tree, "before", [30, 3, 17, 8])
    # without a key: requests that are one's own, by ids that nobody else can guess
    mine = f"eagle-trace-{secrets.token_hex(16)}"
    started = tree.post("/eagle_trace/start", {"named": {f"{mine}-{n}": [n, f"tree-{n}"] for n in range(4)}})
    recorded = ask_many(tree, mine, [30, 3, 17, 8])
    assert tree.status == {"state": "recording"}, "all that anybody is told"
    assert status_of(lambda: tree.post("/eagle_trace/finish", {})) == 403
    tree.ask("POST", "/eagle_trace/finish", {}, **{"X-Eagle-Trace-Token": started["token"]})
    tree.wait_until("ready")
    assert [one["text"] for one in recorded] == [one["text"] for one in before]
    trace = open_trace(started["out"])
    rows = trace.rows
    paths = {(r, s, p) for r, s, p in zip(rows.root.tolist(), rows.step.tolist(), rows.paths(), strict=True)}
    assert len({path for _, step, path in paths if step == 2}) > 8, "each row knows its own path"
    assert not np.all(rows.own_path)
    assert_healthy(train, trace)


def test_a_killed_scheduler_leaves_a_partial_trace_and_a_clear_word(tree: Attached, tmp_path: Path) -> None:
    # far more than any machine answers before the first rows reach the disk, which they do every few seconds
    prompts = write_prompts(tmp_path / "p.jsonl", *({"prompt": text * 3} for text in TEXTS * 50))
    before = set(tree.traces)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            attach, **tree.reach, prompts=prompts, out=tmp_path / "s.trace", max_new_tokens=600, batch_size=6
        )
        wait_for(lambda: set(tree.traces) - before or asked.done(), lambda: "no recording began")
        (path,) = set(tree.traces) - before

        def written() -> Any:
            """The open manifest, once it says that there are whole files."""
            seals = [json.loads(file.read_bytes()) for file in path.glob(OPEN_SEAL)]
            return seals[0] if seals and seals[0]["files"] else None

        wait_for(lambda: written() or asked.done(), lambda: "nothing was written")
        # who is recording is told by the open manifest: the scheduler's process
        manifest = written()
        psutil.Process(int(manifest["recorder"].rsplit(":", 1)[1])).kill()
        with pytest.raises((HostError, RecordingError)):
            asked.result(300)
    partial = open_trace(path, allow_partial=True)
    assert not partial.sealed
    assert len(partial.rows) > 0


ENGINE = """
import sys
import sglang

if __name__ == "__main__":
    target, draft, out = sys.argv[1:]
    engine = sglang.Engine(
        model_path=target, speculative_algorithm="EAGLE3", speculative_draft_model_path=draft,
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, dtype="float32",
        device="cpu", attention_backend="intel_amx", mem_fraction_static=0.3, max_total_tokens=8192, sleep_on_idle=True,
    )
    ask = lambda text: engine.generate(text, {"temperature": 0, "max_new_tokens": 12})
    from eagle_trace_serving.attached import control
    from eagle_trace_serving.orders import Order
    while not control().last:  # the first may be answered before it records; it seals by itself
        ask("def ")
    control().start(Order(out + "/again.trace", level="stats", alone=False))
    ask("class ")
    control().finish()
    engine.shutdown()
"""


def test_an_engine_in_the_users_own_process(folder: Path, deployed: Path, train: Train, tmp_path: Path) -> None:
    from sglang_cpu_eagle import cpu_environment

    script = tmp_path / "mine.py"
    script.write_text(ENGINE)
    out = tmp_path / "recorded"
    armed = {"EAGLE_TRACE_OUT": str(out), "EAGLE_TRACE_REQUESTS": "1"}
    command = [sys.executable, str(script), str(TARGET), str(deployed), str(out)]
    done = subprocess.run(
        command, env=cpu_environment(os.environ) | armed, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, again = sorted(out.iterdir(), key=lambda path: path.name == "again.trace")
    assert_healthy(train, open_trace(first))
    assert open_trace(again).manifest.level == "stats"
    assert len(open_trace(again).prompts) == 1
