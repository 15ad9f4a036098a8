"""Drafts of several target families on the real hosts: tiny random checkpoints, two SGLang starts for each family.

A healthy pair agrees, in the widest dtype that SGLang's class computes in; the same draft fed one layer instead of
three is named at `fused`. Where SGLang feeds something else than the layers, the diff says so. The other families of
docs/support.md: ``python -m tests.support.target_pairs``.
"""

from __future__ import annotations

import base64
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.errors import CheckpointError
from eagle_trace_serving import process
from eagle_trace_training.routing import Routing
from eagle_trace_training.target_model import decoder_of, load_target
from tests.support import faults, never_captures
from tests.support.attached import server
from tests.support.target_pairs import TargetPair, make
from tests.support.tiny_speculators import Pair
from tests.support.tiny_targets import FAMILIES, HIDDEN, IDS, LAYERS, write_family_target
from tests.support.unimported import unimported_in
from tests.support.verdicts import expect
from tests.support.warm.start import Warm

pytest.importorskip("speculators")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
#: one of each kind: latent attention, a multimodal class around it, experts, sinks and windows, norms behind the
#: branches, three-dimensional positions
HERE = ("deepseek_v3", "kimi_k25", "qwen3_moe", "gpt_oss", "gemma3", "qwen3_vl")
#: families of which SGLang 0.5.23 feeds the last MLP's output alone, without the stream it is added to
WITHOUT_RESIDUAL = ("gemma3",)
#: layers with experts
WITH_EXPERTS = {
    "deepseek_v3": [1, 2, 3, 4, 5], "kimi_k25": [1, 2, 3, 4, 5], "qwen3_moe": [0, 1, 2, 3, 4, 5],
    "gpt_oss": [0, 1, 2, 3, 4, 5], "glm4_moe": [1, 2, 3, 4, 5], "llama4": [1, 3, 5], "minimax_m2": [0, 1, 2, 3, 4, 5],
}  # fmt: skip
#: modules of SGLang's that need kernels nobody has on a CPU: it serves none of their models there
UNIMPORTED = {"sglang.srt.models.falcon_mamba", "sglang.srt.models.mamba"}


@pytest.fixture(scope="module", params=HERE)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> TargetPair:
    return make(request.param, tmp_path_factory.mktemp(request.param), warm)


@pytest.fixture(scope="module")
def healthy(target: TargetPair) -> Trace:
    return target.serve(target.deployed)


def test_the_static_check_passes_the_deployed_draft(target: TargetPair) -> None:
    assert target.failures() == []


def test_a_healthy_pair_agrees_or_what_the_engine_feeds_instead_is_named(target: TargetPair, healthy: Trace) -> None:
    result = target.diffed(healthy)
    assert result.coverage.matched == result.coverage.train_rows > 40
    if target.name in WITHOUT_RESIDUAL:
        expect(result, "features-without-residual", "target.hidden.0")
        assert result.diagnosis is not None
        (cause,) = result.diagnosis.confirmed
        assert f"{target.family.architecture} in SGLang 0.5.23" in str(cause.fix)
    else:
        expect(result, None, None)


def test_the_manifest_holds_what_the_loaded_target_was_told(target: TargetPair, healthy: Trace) -> None:
    facts = healthy.manifest.target
    assert (facts["architecture"], facts["captures"]) == (target.family.architecture, True)
    assert facts["captured_inputs"] == list(IDS)


def test_one_layer_instead_of_three_is_named(target: TargetPair) -> None:
    served = target.serve(target.single())
    assert served.manifest.target["captures"] is False
    result = target.diffed(served)
    expect(result, "single-layer-features", "fused")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert cause.fix == "set eagle_config.use_aux_hidden_state to true"


def test_a_target_class_that_forgets_to_capture_is_named_with_its_release(
    tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(ROOT / "tests/support/engine_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(never_captures.VARIABLE, "1")
    kimi = make("kimi_k25", tmp_path, warm)
    result = kimi.diffed(kimi.serve(kimi.deployed))
    expect(result, "single-layer-features", "fused")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert "KimiK25ForConditionalGeneration in SGLang 0.5.23 was never told to capture" in str(cause.fix)


def refine_sinks(held: dict[str, Any]) -> None:
    held.update({name: one * 1.001 for name, one in held.items() if name.endswith(".sinks")})


@pytest.mark.parametrize(
    ("name", "edits", "words"),
    [
        ("gpt_oss", {"tensors": refine_sinks}, "holds self_attn.sinks in bfloat16 whatever the dtype"),
        ("deepseek_v3", {"config": lambda c: c.update(rms_norm_eps=1e-3)}, "norms the target's latents with its rms"),
    ],
)
def test_what_the_engines_class_computes_otherwise_than_transformers_is_named(
    name: str, edits: dict[str, Any], words: str, tmp_path: Path, warm: Warm
) -> None:
    published = make(name, tmp_path, warm)
    edited = faults.edit(published.pair.target, tmp_path / "edited", **edits)
    pair = replace(published, pair=Pair(edited, published.pair.draft))
    result = pair.diffed(pair.serve(pair.deployed))
    expect(result, "target-differs", "target.hidden.0")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert words in cause.evidence


def test_modules_of_sglang_that_cannot_be_imported_are_known(warm: Warm) -> None:
    """SGLang passes over a module without a word when an operator it looks up is absent, and then lacks its models."""
    with warm():
        failed = unimported_in(process.PYTHON)
    assert set(failed) == UNIMPORTED, failed


@pytest.mark.parametrize("name", FAMILIES)
def test_the_target_of_every_family_runs_in_the_dtype_of_the_rounding_floor(name: str, tmp_path: Path) -> None:
    import torch

    folder = write_family_target(name, tmp_path / "target")
    model = load_target(folder, torch.float64)
    decoder = decoder_of(model.eval(), folder)
    assert len(decoder.layers) == LAYERS
    routing = Routing(decoder, LAYERS, "float32")
    with torch.no_grad(), routing.watching():
        hidden = decoder(input_ids=torch.arange(16, 25)[None], use_cache=False)[0]
        routing.keep(0)
        decoder(input_ids=torch.arange(16, 25)[None], use_cache=False)
        routing.measure(0)
    # each layer's choice of experts is found, however its class scores them
    assert (routing.layers, routing.unread) == (WITH_EXPERTS.get(name, []), [])
    assert (hidden.dtype, tuple(hidden.shape)) == (torch.float64, (1, 9, HIDDEN))
    assert bool(hidden.isfinite().all())
    assert model.config._attn_implementation == ("eager" if name == "gpt_oss" else "sdpa")


def test_a_target_that_only_its_own_code_reads_is_refused_without_running_it(tmp_path: Path) -> None:
    import torch

    config = {"model_type": "unheard_of", "architectures": ["X"], "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="transformers cannot load the target"):
        load_target(tmp_path, torch.float32)
    assert not (tmp_path / "ran").exists()


def an_image() -> str:
    """A small image as a client sends it."""
    from PIL import Image

    with io.BytesIO() as stream:
        Image.linear_gradient("L").resize((56, 56)).convert("RGB").save(stream, "PNG")
        return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def test_of_a_server_that_sees_images_the_requests_of_text_are_recorded(tmp_path: Path, warm: Warm) -> None:
    qwen = make("qwen3_vl", tmp_path, warm)
    arguments = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--disable-radix-cache"]
    # SGLang warms a multimodal server up with a chat, which wants a template
    arguments.append("--skip-server-warmup")
    with warm(), server(tmp_path, qwen.pair.target, qwen.deployed, *arguments, EAGLE_TRACE_REQUESTS="1") as running:
        running.wait_until("recording")
        sampling = {"max_new_tokens": 8, "temperature": 0}
        text = "w20 w21 <|vision_start|> <|image_pad|> <|vision_end|> w30"
        seen = running.post("/generate", {"text": text, "image_data": an_image(), "sampling_params": sampling})
        assert seen["meta_info"]["prompt_tokens"] > 6, "the image takes tokens of its own"
        ids = [20, 21, 22, 30, 31, 32, 33]
        running.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        running.wait_until("ready")
        served = open_trace(running.traces[0])
    assert served.prompts.num_prompt_tokens.tolist() == [len(ids)]
    assert any(one["rows"].startswith("1 requests that came with an image") for one in served.manifest.not_materialised)
    expect(qwen.diffed(served), None, None)
