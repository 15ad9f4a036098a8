"""The real SGLang engine on our CPU kernels: speculation may change the speed, but never the text.

Engines are processes of their own, since SGLang reads the environment when it is imported and keeps its state
for the life of a process.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from transformers import AutoModelForCausalLM

from sglang_cpu_eagle import cpu_environment
from tests.support.own_process import run_module
from tests.support.tiny_models import write_tiny_draft, write_tiny_target
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

Answers = list[list[dict[str, Any]]]
Engines = Callable[[str, str], Answers]

PROMPT_LENGTHS = (5, 23, 150, 11)
NEW_TOKENS = 48
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0}
#: Sampling with only the likeliest word left: greedy text by way of the sampling kernels.
NARROWED = {**SAMPLED, "top_p": 1e-6}
SHAPES: dict[str, dict[str, int]] = {
    "plain": {},
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
}
#: Batches of another size round differently, so a choice between two words this close, in logits, is free. In
#: bfloat16 one logit of the tiny target is off by up to 0.08.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.15}

OPTIONS = {
    "device": "cpu",
    "attention_backend": "intel_amx",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "chunked_prefill_size": 64,  # small enough to cut the longest prompt in pieces
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "log_level": "error",
}

# The requests of every engine, in this order.
TOGETHER, ALONE, AGAIN, NARROW, MIXED = range(5)


def _requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"input_ids": prompts, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2},
        # The last prompt, in a batch of one, then once more: its prefix comes from the radix cache.
        {
            "input_ids": [[*prompts[-1], 7]],
            "sampling_params": GREEDY,
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
        {"input_ids": [[*prompts[-1], 7]], "sampling_params": GREEDY},
        {"input_ids": prompts, "sampling_params": NARROWED},
        {"input_ids": prompts, "sampling_params": [GREEDY, SAMPLED, {**SAMPLED, "top_k": 3}, GREEDY]},
    ]


def _run(folder: Path, options: dict[str, Any], requests: list[dict[str, Any]]) -> Answers:
    """One engine in a process of its own, with our CPU support as its only plugin."""
    info = folder / "plugin" / "eagle_trace_cpu_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle-trace-cpu-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\neagle_trace_cpu_test = sglang_cpu_eagle:install\n")
    job = {"options": OPTIONS | options, "requests": requests, "answers": str(folder / "answers.json")}
    (folder / "job.json").write_text(json.dumps(job))
    environment = cpu_environment(os.environ)
    environment["PYTHONPATH"] += os.pathsep + str(info.parent)
    environment["SGLANG_PLUGINS"] = "eagle_trace_cpu_test"
    # Threads only wait for one another on matrices this small.
    environment["OMP_NUM_THREADS"] = "1"
    run_module("tests.support.engine_run", folder / "job.json", environment=environment)
    answers: Answers = json.loads((folder / "answers.json").read_text())
    return answers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_draft(folder / "draft", write_tiny_target(folder / "target"))
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, 384) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def engines(models: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Engines:
    """Answers of the engine of a shape and dtype; each of the six is started once, when first asked for."""
    answers: dict[tuple[str, str], Answers] = {}

    def ask(shape: str, dtype: str) -> Answers:
        if (shape, dtype) not in answers:
            options: dict[str, Any] = {"model_path": str(models / "target"), "dtype": dtype, **SHAPES[shape]}
            if shape != "plain":
                draft = str(models / "draft")
                options |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft}
            folder = tmp_path_factory.mktemp(f"{shape}-{dtype}")
            with warm():
                answers[shape, dtype] = _run(folder, options, _requests(prompts))
        return answers[shape, dtype]

    return ask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
def test_every_greedy_token_is_the_choice_of_the_same_model_in_transformers(
    engines: Engines, models: Path, prompts: list[list[int]], shape: str, dtype: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=getattr(torch, dtype)).eval()
    for prompt, answer in zip(prompts, engines(shape, dtype)[TOGETHER], strict=True):
        ids = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        behind = logits.max(dim=-1).values - logits[torch.arange(len(ids)), torch.tensor(ids)]
        assert float(behind.max()) <= NEAR_TIE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
class TestSpeculation:
    def test_greedy_text_is_that_of_the_target_alone(self, engines: Engines, shape: str, dtype: str) -> None:
        plain, speculative = engines("plain", dtype), engines(shape, dtype)
        _assert_same_text(plain[TOGETHER] + plain[ALONE], speculative[TOGETHER] + speculative[ALONE], NEAR_TIE[dtype])

    def test_some_drafts_are_accepted_and_some_are_not(self, engines: Engines, shape: str, dtype: str) -> None:
        infos = [answer["meta_info"] for answer in engines(shape, dtype)[TOGETHER]]
        accepted = sum(info["spec_num_correct_drafts"] for info in infos)
        rounds = sum(info["spec_verify_ct"] for info in infos)
        assert 0.2 * rounds < accepted < 2.5 * rounds

    def test_a_prefix_from_the_radix_cache_gives_the_same_text(self, engines: Engines, shape: str, dtype: str) -> None:
        answers = engines(shape, dtype)
        assert answers[AGAIN][0]["meta_info"]["cached_tokens"] > 0
        _assert_same_text(answers[ALONE], answers[AGAIN], NEAR_TIE[dtype])

    def test_sampling_from_one_word_gives_greedy_text(self, engines: Engines, shape: str, dtype: str) -> None:
        answers = engines(shape, dtype)
        _assert_same_text(answers[TOGETHER], answers[NARROW], NEAR_TIE[dtype])

    def test_requests_that_sample_do_and_leave_the_greedy_ones_beside_them_alone(
        self, engines: Engines, shape: str, dtype: str
    ) -> None:
        answers = engines(shape, dtype)
        greedy, mixed = answers[TOGETHER], answers[MIXED]
        _assert_same_text([greedy[0], greedy[3]], [mixed[0], mixed[3]], NEAR_TIE[dtype])
        # The target is unsure of most words, so equal texts would mean that the temperature was ignored.
        for row in (1, 2):
            agreeing = sum(map(int.__eq__, greedy[row]["output_ids"], mixed[row]["output_ids"]))
            assert agreeing < NEW_TOKENS // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tree_is_accepted_further_than_its_best_chain(engines: Engines, dtype: str) -> None:
    chain, tree = (
        sum(answer["meta_info"]["spec_verify_ct"] for answer in engines(shape, dtype)[TOGETHER])
        for shape in ("chain", "tree")
    )
    assert tree < chain


def _assert_same_text(wanted: list[dict[str, Any]], got: list[dict[str, Any]], near_tie: float) -> None:
    """Answers may part only where the wanted choice was a near tie; nothing behind that is compared."""
    for left, right in zip(wanted, got, strict=True):
        pairs = zip(left["output_ids"], right["output_ids"], strict=True)
        parting = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if parting is not None:
            first, second = left["meta_info"]["output_top_logprobs"][parting]
            assert first[0] - second[0] < near_tie, f"parted at token {parting}"
