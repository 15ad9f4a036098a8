"""What is read off SGLang's own arguments before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_serving.arguments import number
from eagle_trace_sglang.deployment import TENSOR_PARALLEL, check_cpu_rotation, check_deployment, check_parallelism
from tests.support import checkpoints as make


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([], 1),
        (["--log-requests"], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4", "--log-requests"], 4),
        (["--tensor-parallel-size", "2", "--tp", "8"], 8),
        (["--tp"], 1),
        (["--tp", "many"], 1),
        (["--tp-extra", "3"], 1),
    ],
)
def test_the_last_word_on_ranks_counts(words: list[str], size: int) -> None:
    assert number(words, TENSOR_PARALLEL) == size


@pytest.mark.parametrize(
    "words",
    [["--dp", "2"], ["--data-parallel-size=2"], ["--attn-dp-size", "2"], ["--tp", "2", "--enable-dp-attention"]],
)
def test_replicas_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="each replica answers other requests"):
        check_parallelism(words)
    check_parallelism(["--dp", "1", "--tp", "2"])


FLAT = make.decoder_config(1) | {"architectures": ["LlamaForCausalLMEagle3"]}
WIDE = {"hidden_size": 80}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({}, {}),
        ({"text_config": None}, {}),
        (WIDE, {"target_hidden_size": 80}),
        ({"hidden_size": 1, "llm_config": {"hidden_size": 64}}, {}),
        ({"thinker_config": {"text_config": {"hidden_size": 64}}, "hidden_size": 1}, {}),
    ],
)
def test_a_pair_of_one_width_is_let_through(target: dict[str, Any], draft: dict[str, Any], tmp_path: Path) -> None:
    one = make.write_checkpoint(tmp_path / "target", make.decoder_config(2) | target, {"x": np.ones(1, np.float32)})
    two = make.write_checkpoint(tmp_path / "draft", FLAT | draft, {"x": np.ones(1, np.float32)})
    check_deployment(one, two)
    (two / "model.safetensors").rename(two / "draft.pt")
    check_deployment(one, two)


@pytest.mark.parametrize(("target", "draft"), [(WIDE, {}), ({}, {"target_hidden_size": 80})])
def test_a_pair_of_two_widths_is_refused(target: dict[str, Any], draft: dict[str, Any], tmp_path: Path) -> None:
    one = make.write_checkpoint(tmp_path / "target", make.decoder_config(2) | target, {"x": np.ones(1, np.float32)})
    two = make.write_checkpoint(tmp_path / "draft", FLAT | draft, {"x": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="do not fit"):
        check_deployment(one, two)


def test_a_pair_that_was_exchanged_is_asked_for(tmp_path: Path) -> None:
    one = make.write_checkpoint(tmp_path / "target", make.decoder_config(2), {"x": np.ones(1, np.float32)})
    two = make.write_checkpoint(tmp_path / "draft", FLAT, {"x": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"given the other way round\?$"):
        check_deployment(two, one)
    with pytest.raises(CheckpointError, match=r"not \['LlamaForCausalLMEagle3'\]$"):
        check_deployment(one, one)


LATENT = {"model_type": "kimi_k2", "kv_lora_rank": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ""),
        ({"rope_scaling": None}, "names no scaling of its rotary embedding"),
        ({"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}}, "names no scaling"),
        ({"rope_interleave": False}, "has rope_interleave false"),
        # other models with latents rotate otherwise, and others have none
        ({"rope_scaling": None, "model_type": "minicpm3"}, ""),
        ({"rope_scaling": None, "kv_lora_rank": None}, ""),
    ],
)
def test_latent_attention_that_sglang_cannot_rotate_on_a_cpu_is_refused(changes: dict[str, Any], words: str) -> None:
    if not words:
        check_cpu_rotation(Path("draft"), LATENT | changes)
        return
    with pytest.raises(CheckpointError, match=f"SGLang cannot compute draft on a CPU: its config {words}"):
        check_cpu_rotation(Path("draft"), LATENT | changes)
