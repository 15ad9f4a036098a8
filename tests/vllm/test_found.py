"""Faults of vLLM itself that recordings of healthy weights show (docs/found.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_trace_analysis import diff
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.engines import engine_named
from tests.support.tiny_speculators import LAYER_IDS, random_prompts, write_pair, write_prompts
from tests.support.warm.start import Warm
from tests.vllm.conftest import Serve, Train

pytestmark = pytest.mark.vllm


def test_runner_v2_ignores_the_layer_ids_of_eagle_config(
    folder: Path, serve: Serve, train: Train, warm: Warm, warm_v2: Warm
) -> None:
    pair, flat = write_pair(folder / "ids", head_dim=32, target_layers=8), folder / "ids/flat"
    export(pair.draft, flat, target=pair.target, engine=engine_named("vllm"))
    config = json.loads((flat / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    (flat / "config.json").write_text(json.dumps(config))
    prompts = write_prompts(folder / "ids.jsonl", random_prompts([30, 20]))
    fed, said = {}, {}
    for name, started in (("V1", warm), ("V2", warm_v2)):
        trace = serve(started=started, target=pair.target, draft=flat, prompts=prompts, max_new_tokens=6)
        assert trace.manifest.settings["runner"] == name
        fed[name] = trace.manifest.settings["layer_ids"]
        said[name] = diff(train(trace, target=pair.target, draft=pair.draft), trace)
    assert fed == {"V1": list(LAYER_IDS), "V2": [2, 4, 5]}
    assert said["V1"].verdict == "agree"
    first = said["V2"].first_divergence
    assert first is not None
    assert first.site == "target.hidden.0"


def test_one_request_near_the_longest_context_stops_drafting_for_all(folder: Path, serve: Serve, train: Train) -> None:
    pair = write_pair(folder / "near", head_dim=32)
    prompts = write_prompts(folder / "near.jsonl", random_prompts([54, 20]))
    trace = serve(
        target=pair.target, draft=pair.draft, prompts=prompts, max_new_tokens=24,
        host_args=("--max-model-len", "64"),
    )  # fmt: skip
    rows = trace.rows
    roots = rows.root[(rows.prompt_id == 1) & (rows.step == 0)]
    # the short one was not drafted for while the long one came near its end, and was again afterwards
    assert set(range(int(roots.max()) + 1)) > set(roots.tolist())
    result = diff(train(trace, target=pair.target, draft=pair.draft), trace)
    first = result.first_divergence
    assert first is not None
    assert first.site == "layer.0.attn.context"
