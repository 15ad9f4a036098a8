"""What the static check says of the target: its own config, and whose numbers count in one of several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.checkpoint.subject import open_target
from tests.support import checkpoints as make
from tests.support.check_cases import named
from tests.support.target_cases import TARGETS, TEXT, flat
from tests.support.tensor_cases import flat as draft_config
from tests.support.tensor_cases import tensors

NOTHING = {"x": np.ones(1, np.float32)}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_checkpoint(tmp_path_factory.mktemp("draft"), draft_config(), tensors())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_at_whose_config_the_engine_stops_is_failed_with_the_key(
    draft: Path, name: str, tmp_path: Path
) -> None:
    config, key = TARGETS[name]
    finding = named(check(draft, target=make.write_checkpoint(tmp_path, config, NOTHING)), "target-class")
    assert finding.status is (Status.FAIL if key else Status.PASS), finding.evidence
    assert key in finding.evidence
    assert key in finding.fix


def test_a_target_with_code_of_its_own_is_not_held_against_the_table(draft: Path, tmp_path: Path) -> None:
    config = flat("LlamaForCausalLM", "llama", attention_bias=None, auto_map={"AutoConfig": "x.Y"})
    finding = named(check(draft, target=make.write_checkpoint(tmp_path, config, NOTHING)), "target-class")
    assert finding.status is Status.PASS


@pytest.mark.parametrize(
    "keys", [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")]
)
def test_the_numbers_of_a_target_are_those_of_its_language_model(keys: tuple[str, ...], tmp_path: Path) -> None:
    config: dict[str, Any] = dict(TEXT)
    for key in reversed(keys):
        config = {key: config}
    config |= {"architectures": ["Some"], "hidden_size": 7, "num_hidden_layers": 3}
    target = open_target(make.write_checkpoint(tmp_path, config, NOTHING))
    assert (target.config["hidden_size"], target.layers) == (make.HIDDEN, make.LAYERS)


def test_a_size_per_layer_of_a_target_stops_nothing(draft: Path, tmp_path: Path) -> None:
    config = flat("Gemma3nForCausalLM", "gemma3n_text", intermediate_size=[96] * make.LAYERS)
    finding = named(check(draft, target=make.write_checkpoint(tmp_path, config, NOTHING)), "target-class")
    assert "cannot give away several layers" in finding.evidence
