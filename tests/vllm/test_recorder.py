"""The serve recorder on the real vLLM: every site and step of the healthy pair agrees with the training forward."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.demo import prompts_file
from eagle_trace.prompts import read_prompts
from eagle_trace.selection import Selection
from eagle_trace.testing import conformance
from eagle_trace_analysis import diff
from eagle_trace_serving.requests import Answers, Request
from eagle_trace_serving.server import Server
from eagle_trace_serving.testing import Served
from tests.support.tiny_speculators import random_prompts, write_pair, write_prompts
from tests.support.warm.start import Warm
from tests.vllm.conftest import Serve, Train

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def request_of_eight() -> Request:
    return Request(read_prompts(prompts_file()), max_new_tokens=24)


@pytest.fixture(scope="module")
def recorded(server: Server, request_of_eight: Request, folder: Path) -> tuple[Trace, Answers]:
    """A batch of eight, and what was answered."""
    out = folder / "eight.trace"
    out.mkdir()
    answers = server.record(request_of_eight, out)
    return open_trace(out), answers


def test_every_row_and_site_of_a_batch_of_eight_agrees_with_training(
    recorded: tuple[Trace, Answers], train: Train
) -> None:
    result = diff(train(recorded[0]), recorded[0])
    assert result.verdict == "agree"
    assert result.coverage.matched == len(recorded[0].rows) > 700
    assert len([one for one in result.sites if one.verdict == "agree"]) == 81


def test_recording_changes_no_answer(
    server: Server, recorded: tuple[Trace, Answers], request_of_eight: Request
) -> None:
    assert server.answer(request_of_eight) == recorded[1]


def test_what_was_answered_stands_in_the_trace(recorded: tuple[Trace, Answers]) -> None:
    trace, answers = recorded
    kept = {row["request_id"]: list(row["output_ids"]) for row in trace.prompts.to_dict("records")}
    assert kept == {rid: list(answer.output_ids) for rid, answer in answers.items()}
    assert set(trace.prompts["finish_reason"]) == {"length"}


def test_the_manifest_says_what_keys_and_values_are_kept_in_and_what_the_target_captures(
    recorded: tuple[Trace, Answers],
) -> None:
    manifest = recorded[0].manifest
    assert manifest.settings["kv_cache_dtype"] == "float32"
    assert "draft_kv_cache_dtype" not in manifest.settings
    assert manifest.target["architecture"] == "LlamaForCausalLM"
    assert manifest.target["captured_inputs"] == manifest.settings["layer_ids"]


def test_rounds_commit_what_was_answered(recorded: tuple[Trace, Answers]) -> None:
    trace, _ = recorded
    for row in trace.prompts.to_dict("records"):
        tokens = list(row["token_ids"])
        rounds = trace.rounds[trace.rounds["prompt_id"] == row["prompt_id"]].to_dict("records")
        assert rounds[0]["root"] == row["num_prompt_tokens"] - 1
        for one in rounds:
            kept = [*one["accepted"], one["bonus"]]
            start = one["root"] + 2
            assert kept == tokens[start : start + len(kept)]
            assert list(one["accepted"]) == list(one["proposed"])[: len(one["accepted"])]
            # a greedy target accepts what it would have chosen
            assert kept == list(one["target_argmax"])[: len(kept)]


def test_parameters_are_those_of_the_checkpoint(recorded: tuple[Trace, Answers], train: Train) -> None:
    def digests(trace: Trace) -> dict[str, str]:
        return dict(zip(trace.params["canonical_name"], trace.params["digest"], strict=True))

    mine, trained = digests(recorded[0]), digests(train(recorded[0]))
    assert {name: trained[name] for name in mine if name in trained} == {
        name: digest for name, digest in mine.items() if name in trained
    }
    assert set(mine) >= {
        "fc.weight",
        "lm_head.weight",
        "embed_tokens.weight",
        "d2t",
        "layers.0.self_attn.q_proj.weight",
    }


def test_a_sketch_of_some_rows_agrees(server: Server, request_of_eight: Request, folder: Path, train: Train) -> None:
    out = folder / "some.trace"
    out.mkdir()
    server.record(request_of_eight, out, level="sketch", selection=Selection.parse(sites="fc.*,logits", roots="0:40"))
    trace = open_trace(out)
    assert set(trace.sites) == {"fc.in", "fc.out", "logits"}
    assert trace.rows.root.max() < 40
    assert diff(train(trace), trace).verdict == "agree"


def test_vllm_keeps_every_promise_of_the_trace_format(server: Server, four_prompts: Path, tmp_path: Path) -> None:
    request = Request(read_prompts(four_prompts)[:3], max_new_tokens=12)
    assert conformance(Served("vllm", server, request), tmp_path) == []


def test_one_prompt_after_the_other_agrees(server: Server, folder: Path, train: Train) -> None:
    out = folder / "single.trace"
    out.mkdir()
    server.record(Request(read_prompts(prompts_file())[:2], max_new_tokens=16, batch_size=1), out)
    trace = open_trace(out)
    result = diff(train(trace), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


def test_bfloat16_agrees(serve: Serve, train: Train) -> None:
    trace = serve(dtype="bfloat16")
    result = diff(train(trace), trace)
    assert trace.manifest.dtype == "bfloat16"
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


@pytest.fixture(scope="module")
def long_prompts(folder: Path) -> Path:
    return write_prompts(folder / "long.jsonl", random_prompts([150, 40, 90]))


@pytest.mark.parametrize("qwen3", [False, True], ids=["llama", "qwen3"])
def test_a_draft_that_keeps_the_normed_stream_agrees(
    qwen3: bool, folder: Path, long_prompts: Path, serve: Serve, train: Train
) -> None:
    pair = write_pair(
        folder / f"normed{qwen3}", qwen3=qwen3, head_dim=32, draft_layers=2 - qwen3, norm_before_residual=True
    )
    trace = serve(target=pair.target, draft=pair.draft, prompts=long_prompts, max_new_tokens=8)
    result = diff(train(trace, target=pair.target, draft=pair.draft), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


def test_a_prefix_cache_is_said_and_skipped(folder: Path, serve: Serve, train: Train) -> None:
    pair = write_pair(folder / "cached", head_dim=32)
    (first,) = random_prompts([150])
    prompts = write_prompts(folder / "twice.jsonl", [first, [*first, 3, 4, 5]])
    trace = serve(
        target=pair.target, draft=pair.draft, prompts=prompts, batch_size=1, max_new_tokens=8,
        host_args=("--enable-prefix-caching", "--block-size", "32"),
    )  # fmt: skip
    cold, cached = trace.prompts["cached_tokens"]
    assert (cold, cached >= 96) == (0, True)
    assert any("prefix cache" in one["why"] for one in trace.manifest.not_materialised)
    result = diff(train(trace, target=pair.target, draft=pair.draft), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


def test_two_ranks_agree_as_one_does(serve: Serve, train: Train) -> None:
    trace = serve(host_args=("--tensor-parallel-size", "2"))
    assert trace.manifest.ranks == 2
    result = diff(train(trace), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)


def test_runner_v2_agrees(serve: Serve, train: Train, warm_v2: Warm) -> None:
    trace = serve(started=warm_v2)
    assert trace.manifest.settings["runner"] == "V2"
    result = diff(train(trace), trace)
    assert result.verdict == "agree"
    assert result.coverage.matched == len(trace.rows)
