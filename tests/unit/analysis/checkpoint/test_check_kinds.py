"""Drafts of other kinds are named by their tensors, whatever the config calls them, and judged no further."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines import engine_named
from tests.support import checkpoints as make
from tests.support import latent
from tests.support.check_cases import named
from tests.support.other_kinds import KINDS, eagle3


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_is_named_with_what_serves_it_and_nothing_follows(kind: str, tmp_path: Path) -> None:
    build, called, served = KINDS[kind]
    result = check(make.write_checkpoint(tmp_path, *build()))
    assert [one.name for one in result.findings] == ["format", "finite"]
    finding = result.findings[0]
    assert finding.status is Status.FAIL
    assert called in finding.evidence
    assert served in finding.fix
    assert 'LlamaForCausalLMEagle3"]' not in finding.fix


def test_a_draft_with_latent_attention_is_not_failed_where_its_class_is_not_known(tmp_path: Path) -> None:
    result = check(latent.write_draft(tmp_path), engine=engine_named("vllm"))
    assert result.exit_status == 0
    finding = named(result, "format")
    assert finding.status is Status.SKIP
    assert "This command knows Eagle3LlamaForCausalLM only" in finding.evidence
    assert "nothing else was checked" in finding.evidence


def test_a_draft_with_a_llama_layer_under_the_latent_class_is_named(tmp_path: Path) -> None:
    config, stored = eagle3("Eagle3DeepseekV2ForCausalLM")
    finding = named(check(make.write_checkpoint(tmp_path, config, stored)), "format")
    assert finding.status is Status.FAIL
    assert "an EAGLE-3 draft with a llama layer" in finding.evidence
    assert finding.fix.endswith('architectures ["LlamaForCausalLMEagle3"]')


def test_values_of_another_kind_are_read_all_the_same(tmp_path: Path) -> None:
    config, stored = KINDS["DFlash"][0]()
    stored["fc.weight"] = np.full_like(stored["fc.weight"], np.nan)
    assert named(check(make.write_checkpoint(tmp_path, config, stored)), "finite").status is Status.FAIL


@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer.", "model.layers.0."])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "EagleModel"])
def test_only_the_tensors_of_an_eagle3_draft_are_told_to_change_their_class(
    architecture: str, prefix: str, tmp_path: Path
) -> None:
    finding = named(check(make.write_checkpoint(tmp_path, *eagle3(architecture, prefix))), "format")
    assert finding.status is Status.FAIL
    assert finding.fix == 'set architectures to ["LlamaForCausalLMEagle3"]'
