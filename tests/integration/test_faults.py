"""Faults planted on the real hosts: each is named where it starts, and healthy pairs agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace
from eagle_trace_analysis import diff
from tests.support import faults
from tests.support.pairs import DRAFT

pytestmark = pytest.mark.integration

Make = Callable[..., Trace]


@pytest.mark.parametrize(
    ("serve_options", "train_options"),
    [
        pytest.param({}, {}, id="fp32"),
        pytest.param({}, {"features": "serve", "target": None}, id="fp32-features-of-the-server"),
        pytest.param({"batch_size": 1}, {}, id="fp32-one-at-a-time"),
        pytest.param({"dtype": "bfloat16"}, {}, id="bf16"),
        pytest.param({"dtype": "bfloat16"}, {"features": "serve", "target": None}, id="bf16-features-of-the-server"),
        pytest.param({"topk": 4, "draft_tokens": 8}, {}, id="fp32-tree"),
        pytest.param({"topk": 4, "draft_tokens": 8, "dtype": "bfloat16"}, {}, id="bf16-tree"),
    ],
)
def test_a_healthy_pair_agrees(serve: Make, train: Make, serve_options: Any, train_options: Any) -> None:
    served = serve(**serve_options)
    result = diff(train(replay=served.path, **train_options), served)
    assert result.verdict == "agree", result.first_divergence
    assert result.captures.matched > 5000
    assert result.coverage.matched == result.coverage.train_rows


def test_a_healthy_batch_of_eight_agrees(serve: Make, train: Make, folder: Path) -> None:
    from eagle_trace.demo import prompts_file

    served = serve(prompts=prompts_file(), batch_size=8, max_new_tokens=48)
    result = diff(train(replay=served.path), served)
    assert result.verdict == "agree", result.first_divergence
    assert result.accept_length.observed >= 1.8


@dataclass(frozen=True)
class Planted:
    site: str
    kind: str
    step: int = 0
    config: Callable[[Any], object] | None = None
    tensors: Callable[[Any], object] | None = None


DEPLOYED_WRONG = {
    "single-layer-features": Planted("fused", "shape", config=faults.single_layer_features),
    "layer-ids-shifted": Planted("target.hidden.0", "values", config=faults.layer_ids_shifted),
    "d2t-absolute": Planted("topk.target_id", "ids", tensors=faults.d2t_minus_arange),
    "weights-missing": Planted("logits", "values", tensors=faults.lm_head_missing),
    "rope-theta": Planted("layer.0.attn.q_rope", "values", config=faults.rope_theta),
    "norm-eps": Planted("layer.0.embed_norm", "values", config=faults.norm_eps),
}

TRAINED_OTHERWISE = {
    "residual-norm": Planted("layer.0.attn.residual", "values", config=faults.norm_before_residual),
    "carry-norm": Planted("carry", "values", config=faults.norm_output),
}


@pytest.mark.parametrize("name", DEPLOYED_WRONG)
def test_a_fault_of_the_deployed_draft_is_named(
    name: str, serve: Make, train: Make, deployed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = DEPLOYED_WRONG[name]
    monkeypatch.setenv(*faults.FRESH_MEMORY)
    broken = faults.edit(deployed, folder / name, config=planted.config, tensors=planted.tensors)
    served = serve(draft=broken)
    expect(planted, diff(train(replay=served.path), served))


@pytest.mark.parametrize("name", TRAINED_OTHERWISE)
def test_a_setting_that_only_training_had_is_named(name: str, serve: Make, train: Make, folder: Path) -> None:
    planted = TRAINED_OTHERWISE[name]
    draft = faults.edit(DRAFT, folder / name, config=planted.config)
    served = serve()
    expect(planted, diff(train(replay=served.path, draft=draft), served))


def test_other_tokens_for_the_same_prompt_are_named(
    serve: Make, train: Make, one_prompt_as_ids: Path, folder: Path
) -> None:
    line = json.loads(one_prompt_as_ids.read_text())
    with_bos = folder / "with_bos.jsonl"
    with_bos.write_text(json.dumps(line | {"input_ids": [256, *line["input_ids"]]}))
    served = serve(prompts=one_prompt_as_ids)
    expect(Planted("token", "tokens"), diff(train(prompts=with_bos), served))


def test_the_same_prompts_without_replay_agree(serve: Make, train: Make, four_prompts: Path) -> None:
    result = diff(train(prompts=four_prompts), serve())
    assert result.verdict == "agree", result.first_divergence


def expect(planted: Planted, result: Any) -> None:
    assert result.verdict == "diverged"
    found = result.first_divergence
    assert (found.site, found.kind, found.step) == (planted.site, planted.kind, planted.step)
