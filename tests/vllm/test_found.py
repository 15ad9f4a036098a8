"""Faults of vLLM itself that recordings of healthy weights show, each named by its cause (docs/found.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.prompts import read_prompts
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.engines import engine_named
from eagle_trace_serving.requests import Request
from eagle_trace_serving.server import Server
from tests.support.tiny_speculators import LAYER_IDS, random_prompts, write_pair, write_prompts
from tests.support.verdicts import expect
from tests.support.warm.start import Warm
from tests.vllm.conftest import Serve, Train

pytestmark = pytest.mark.vllm


def looked_at(train: Trace, serve: Trace) -> Diff:
    return diagnosed(diff(train, serve), train, serve)


@pytest.fixture(scope="module")
def chunked_and_near(folder: Path, serve: Serve, train: Train, warm: Warm, warm_v2: Warm) -> dict[str, Diff]:
    """By runner: a prompt in two chunks that comes near the longest context, and a short one beside it."""
    pair = write_pair(folder / "near", head_dim=32)
    prompts = write_prompts(folder / "near.jsonl", random_prompts([54, 20]))
    options = ("--max-model-len", "64", "--max-num-batched-tokens", "32", "--max-num-seqs", "4")
    found = {}
    for name, started in (("V1", warm), ("V2", warm_v2)):
        trace = serve(
            started=started, target=pair.target, draft=pair.draft, prompts=prompts, max_new_tokens=24, host_args=options
        )
        assert trace.manifest.settings["runner"] == name
        found[name] = looked_at(train(trace, target=pair.target, draft=pair.draft), trace)
    return found


def _evidence(result: Diff, cause: str) -> str:
    assert result.diagnosis is not None
    return next(one.evidence for one in result.diagnosis.confirmed if one.cause == cause)


def test_runner_v1_feeds_the_last_token_of_the_prompt_at_the_end_of_a_chunk(chunked_and_near: dict[str, Diff]) -> None:
    assert "are fed the last token of the whole prompt" in _evidence(chunked_and_near["V1"], "chunk-end-token")


def test_runner_v1_drafts_for_nobody_while_one_request_is_near_the_longest_context(
    chunked_and_near: dict[str, Diff],
) -> None:
    said = _evidence(chunked_and_near["V1"], "kv-rows-missing")
    assert said.startswith("the draft was not run for")
    assert said.endswith("prompt 0 came within the draft's length of the longest context, 64")


def test_runner_v1_has_these_two_faults_and_runner_v2_has_none(chunked_and_near: dict[str, Diff]) -> None:
    first, second = chunked_and_near["V1"].diagnosis, chunked_and_near["V2"].diagnosis
    assert first is not None
    assert {one.cause for one in first.confirmed} == {"chunk-end-token", "kv-rows-missing"}
    assert not first.unexplained
    assert second is not None
    assert not second.confirmed
    assert chunked_and_near["V2"].verdict == "agree"


def test_runner_v2_ignores_the_layer_ids_of_eagle_config(
    folder: Path, serve: Serve, train: Train, warm: Warm, warm_v2: Warm
) -> None:
    pair, flat = write_pair(folder / "ids", head_dim=32, target_layers=8), folder / "ids/flat"
    export(pair.draft, flat, target=pair.target, engine=engine_named("vllm"))
    config = json.loads((flat / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    (flat / "config.json").write_text(json.dumps(config))
    prompts = write_prompts(folder / "ids.jsonl", random_prompts([30, 20]))

    def look(started: Warm, layers: Sequence[int], cause: str | None) -> None:
        trace = serve(started=started, target=pair.target, draft=flat, prompts=prompts, max_new_tokens=6)
        assert trace.manifest.settings["layer_ids"] == list(layers)
        result = looked_at(train(trace, target=pair.target, draft=pair.draft), trace)
        expect(result, cause, "target.hidden.0" if cause else None)

    look(warm, LAYER_IDS, None)
    look(warm_v2, [2, 4, 5], "layer-ids-ignored")


def test_without_padded_batches_runner_v1_sees_slots_behind_its_own_on_a_cpu(serve: Serve, train: Train) -> None:
    trace = serve(host_args=("--speculative-config", json.dumps({"disable_padded_drafter_batch": True})))
    result = looked_at(train(trace), trace)
    expect(result, "kv-length", "layer.0.attn.context")
    assert "one empty slot behind its own for each draft step so far" in _evidence(result, "kv-length")


def test_at_a_temperature_runner_v1_rejects_what_it_then_commits_on_a_cpu(
    folder: Path, four_prompts: Path, server: Server, train: Train
) -> None:
    out = folder / "hot.trace"
    out.mkdir()
    server.record(Request(read_prompts(four_prompts), max_new_tokens=24, temperature=1.0), out)
    trace = open_trace(out)
    result = looked_at(train(trace), trace)
    assert result.verdict == "agree"
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["verify-rejects"]
    rounds = trace.rounds
    # a target that answers greedily accepts more than two of three drafts of this pair
    assert np.mean([len(one) for one in rounds["accepted"]]) < 1
