"""vLLM as a host, without vLLM: what is refused before anything starts, how it is asked, what its ids mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError, EagleTraceError, HostError, UsageError
from eagle_trace.prompts import Prompt
from eagle_trace.recording import hosts
from eagle_trace.recording.hooks import Hooks
from eagle_trace_serving.access import DeniedError, Keys
from eagle_trace_serving.facts import cached_as
from eagle_trace_serving.host import Address, ServerOptions
from eagle_trace_serving.releases import Releases
from eagle_trace_serving.requests import Request
from eagle_trace_vllm import arming, plugin, releases
from eagle_trace_vllm.asking import answers, ask, ask_all, request_id
from eagle_trace_vllm.deployment import launch, speculation
from eagle_trace_vllm.host import HOST
from eagle_trace_vllm.requests import Asked
from eagle_trace_vllm.runners import hook_runner
from eagle_trace_vllm.worker import kept_in
from tests.support.pairs import DRAFT, TARGET

PAIR = ServerOptions(TARGET, DRAFT, device="cpu")


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"topk": 4}, UsageError, "chains and no trees"),
        ({"draft_tokens": 8}, UsageError, "without --draft-tokens"),
        ({"keep_cuda_graphs": True}, UsageError, "without --keep-cuda-graphs|CUDA graphs"),
        ({"host_args": ("--data-parallel-size", "2")}, UsageError, "--data-parallel-size"),
        ({"host_args": ("--api-server-count=2",)}, UsageError, "--api-server-count"),
        ({"host_args": ("--api-key", "mine")}, UsageError, "leave out --api-key"),
        ({"host_args": ("--speculative-config", "{")}, UsageError, "takes a JSON object"),
        ({"host_args": ("--speculative-config", "[1]")}, UsageError, "takes a JSON object"),
        ({"host_args": ("--speculative-config", '{"method": "ngram"}')}, UsageError, "asks for the method ngram"),
        ({"draft": TARGET}, CheckpointError, "is not a draft that is recorded on vLLM"),
        ({"target": DRAFT}, CheckpointError, "do not fit|no target"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_in_a_sentence(
    changed: dict[str, Any], kind: type[EagleTraceError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        HOST.check(replace(PAIR, **changed))
    assert "\n" not in str(caught.value)


def test_a_pair_that_can_be_served_is_not_refused() -> None:
    HOST.check(PAIR)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculators_model_type": "dflash"}, "a draft of the kind dflash"),
        ({"transformer_layer_config": {"model_type": "gemma3", "hidden_size": 128}}, "a gemma3 layer"),
        ({"speculators_model_type": None, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2"),
    ],
)
def test_a_draft_of_another_kind_is_named(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    written = json.loads((DRAFT / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=said):
        HOST.check(replace(PAIR, draft=tmp_path))


def test_the_users_speculative_config_is_laid_over_ours() -> None:
    given = speculation(replace(PAIR, host_args=("--speculative-config", '{"disable_padded_drafter_batch": true}')))
    assert given == {
        "model": str(DRAFT), "method": "eagle3", "num_speculative_tokens": 3, "disable_padded_drafter_batch": True,
    }  # fmt: skip


def test_the_key_is_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_trace_vllm.deployment.check_release", lambda _device: [])
    started = launch(PAIR, Address(1234, "secret"), {})
    assert "secret" not in json.dumps(started.job)
    assert started.environment["VLLM_API_KEY"] == "secret"
    assert started.job["arguments"][-4:] == ["--host", "127.0.0.1", "--port", "1234"]


@pytest.mark.parametrize(
    ("internal", "rid"),
    [
        ("cmpl-mine-0-0a1b2c3d", "mine"),
        ("cmpl-mine-2-0a1b2c3d", "mine-2"),
        ("cmpl-eval-7-0-0a1b2c3d", "eval-7"),
        ("cmpl-eagle-trace+8-3-0a1b2c3d", "eagle-trace-11"),
        ("chatcmpl-mine-0a1b2c3d", "mine"),
        ("17-0a1b2c3d", "17"),
        ("of another form", "of another form"),
    ],
)
def test_an_id_of_the_workers_is_the_one_that_was_asked_under(internal: str, rid: str) -> None:
    assert request_id(internal) == rid


def test_prompts_that_arrive_at_once_have_the_ids_they_were_asked_under() -> None:
    prompts = [Prompt(str(number), input_ids=[number]) for number in range(12)]
    rids = Request(prompts).rids[8:12]
    asked = ask_all(rids, [[1], [2], [3], [4]], Request(prompts))
    inside = [f"cmpl-{asked.body['request_id']}-{number}-0a1b2c3d" for number in range(4)]
    assert [request_id(one) for one in inside] == rids


def test_messages_go_where_the_servers_template_is_applied() -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = Prompt("p", messages=messages)
    asked = ask(prompt, "mine", Request([prompt]))
    assert (asked.path, asked.body["messages"]) == ("/v1/chat/completions", messages)


def test_answers_are_in_the_order_of_the_prompts() -> None:
    choices = [{"index": n, "token_ids": [n], "text": str(n)} for n in (1, 10, 0, 2, 3, 4, 5, 6, 7, 8, 9)]
    got = answers({"choices": choices}, [str(n) for n in range(11)])
    assert [list(one.output_ids) for one in got] == [[n] for n in range(11)]
    with pytest.raises(ValueError, match="2 prompts"):
        answers({"choices": choices[:1]}, ["a", "b"])
    with pytest.raises(ValueError, match="1 prompts"):
        answers("no such thing", ["a"])


@pytest.mark.parametrize(
    ("given", "variable", "keys"),
    [
        (["one", "two"], "ignored", ("one", "two")),
        ("one", None, ("one",)),
        (None, "variable", ("variable",)),
        ([], None, ()),
    ],
)
def test_each_of_vllms_keys_does_what_a_key_may(
    given: Any, variable: str | None, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, arming.ENGINE, SimpleNamespace(AsyncLLM=SimpleNamespace(shutdown=None)))  # type: ignore[arg-type]
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    hung: list[Any] = []
    armed: Any = SimpleNamespace(add_routes=lambda *words: hung.append(words), ready=lambda: None)
    arming._serve(SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=given))), armed)
    guarded = Keys(tuple(key for key in hung[0][1] if key))
    assert guarded.api_keys == keys
    for key in keys:
        assert guarded.may_do_all({"authorization": f"Bearer {key}"})
    for wrong in ("", "Bearer ", "Bearer onetwo", "Basic one", "Bearer ignored"):
        if keys:
            with pytest.raises(DeniedError):
                guarded.may_do_all({"authorization": wrong})


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package `vllm` of our own in the way of any other; `without` leaves out names."""

    def run(name: str, *without: str) -> None:
        for point in releases.HOOK_POINTS:
            lines = []
            for one in point.names:
                owner, _, inner = one.rpartition(".")
                if one not in without:
                    lines.append(f"class {owner}:\n    def {inner}(self): pass" if owner else f"def {one}(): pass")
            file = tmp_path / "vllm" / point.file
            file.parent.mkdir(parents=True, exist_ok=True)
            old = file.read_text() if file.exists() else ""
            file.write_text(old + "\n".join(lines) + "\n")
        monkeypatch.setattr(Releases, "installed", lambda _releases: (name, tmp_path / "vllm"))

    return run


def test_a_release_without_a_hook_point_is_refused_by_name(install: Install) -> None:
    install("0.10.2+cpu", "WorkerWrapperBase.init_device")
    with pytest.raises(
        HostError, match=r"vLLM 0\.10\.2 is not supported on cpu: it has no WorkerWrapperBase\.init_device"
    ):
        releases.check_release("cpu")


def test_a_release_that_was_not_tested_is_recorded_with_a_warning(install: Install) -> None:
    install("0.99.0+cpu")
    (warning,) = releases.check_release("cpu")
    assert "vLLM 0.99.0 is not among the releases" in warning


def test_a_wheel_for_another_device_is_refused(install: Install) -> None:
    install("0.32.0")
    assert releases.check_release("cuda") == []
    with pytest.raises(HostError, match="built for a GPU, not for cpu"):
        releases.check_release("cpu")


def test_where_vllm_is_not_installed_one_sentence_says_where_to_run_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "is_installed", lambda _host: False)
    with pytest.raises(
        UsageError, match=r"vLLM is not installed here: .* environment of its own, and run this command"
    ):
        hosts.find_host("server", "vllm")


def sampling(**given: Any) -> SimpleNamespace:
    plain = {"eos_token_id": 2, "stop_token_ids": [], "min_tokens": 0, "max_tokens": 5, "stop": []}
    return SimpleNamespace(**plain | given)


@pytest.mark.parametrize(
    ("sampled", "given", "ended", "answer", "reason"),
    [
        ([7, 8, 9], {}, False, [7, 8, 9], None),
        ([7, 8, 9, 7, 8, 9], {}, True, [7, 8, 9, 7, 8], "length"),
        ([7, 2, 9], {}, True, [7, 2], "stop"),
        ([7, 2, 9], {"eos_token_id": None, "stop_token_ids": [9]}, True, [7, 2, 9], "stop"),
        ([2, 8, 2], {"min_tokens": 2}, True, [2, 8, 2], "stop"),
        ([7, 8, 9, 7, 8, 2], {}, True, [7, 8, 9, 7, 8], "length"),
        ([7, 8], {}, True, [7, 8], "abort"),
        ([7, 8], {"stop": ["word"]}, True, [7, 8], "stop"),
        ([7] * 20, {"max_tokens": 100}, True, [7] * 7, "length"),
    ],
)
def test_an_answer_is_cut_as_vllm_cuts_it(
    sampled: list[int], given: dict[str, Any], ended: bool, answer: list[int], reason: str | None
) -> None:
    request = Asked("r", [1, 2, 3], 10, sampled=sampled, ended=ended, sampling=sampling(**given))
    assert (list(request.answer_ids), request.finish_reason) == (answer, reason)


@pytest.mark.parametrize("error", [HostError("no vLLM here"), RuntimeError("a bug")])
def test_nothing_that_goes_wrong_in_the_plugin_reaches_the_server(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fails(_releases: Releases) -> tuple[str, Path]:
        raise error

    monkeypatch.setenv("EAGLE_TRACE_OUT", str(tmp_path))
    monkeypatch.delenv("EAGLE_TRACE_SESSION", raising=False)
    monkeypatch.setattr(Releases, "installed", fails)
    plugin.load()
    assert str(error) in caplog.text
    # a bug keeps its traceback, a sentence has none
    assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("dtype", "named", "kept"),
    [
        ("torch.bfloat16", "auto", "bfloat16"),
        ("torch.uint8", "fp8", "float8_e4m3fn"),
        ("torch.uint8", "fp8_e5m2", "float8_e5m2"),
        ("torch.float8_e4m3fn", "fp8_inc", "float8_e4m3fn"),
        ("torch.uint8", "nvfp4", "nvfp4"),
        (None, "auto", ""),
    ],
)
def test_a_cache_of_bytes_is_named_for_what_the_bytes_are(dtype: str | None, named: str, kept: str) -> None:
    attention = SimpleNamespace(kv_cache_torch_dtype=dtype, kv_cache_dtype=named)
    assert kept_in(SimpleNamespace(modules=lambda: [SimpleNamespace(), attention])) == kept


def test_the_drafts_cache_is_told_where_it_is_another_one() -> None:
    assert cached_as("torch.bfloat16", "bfloat16") == {"kv_cache_dtype": "bfloat16"}
    assert cached_as("float8_e4m3fn", "torch.bfloat16") == {
        "kv_cache_dtype": "float8_e4m3fn",
        "draft_kv_cache_dtype": "bfloat16",
    }
    assert cached_as(None, "") == {}


def test_a_recording_that_begins_while_tokens_are_sampled_does_not_miss_what_was_asked_before() -> None:
    runner: Any = SimpleNamespace(drafter=SimpleNamespace(propose=lambda: None), _sample=None)
    told: list[Any] = []
    recording: Any = SimpleNamespace(take_sampled=told.append)
    begun = False

    def while_it_goes_on(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: function(*given) if begun else None

    def sample(_logits: Any) -> None:
        nonlocal begun
        begun = True

    runner._sample = sample
    with Hooks(while_it_goes_on) as hooks:
        hook_runner(hooks, runner, recording)
        runner._sample("logits")
    assert (begun, told) == (True, [])
