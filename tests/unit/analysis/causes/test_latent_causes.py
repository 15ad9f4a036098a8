"""Drafts with latent attention: each cause is confirmed on its fault at its site, and none on a healthy pair.

The train side expands the latents into keys and values of each head, the server attends over the latents themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_trace.families import EAGLE3_MLA
from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff
from eagle_trace_analysis.causes import REGISTRY
from eagle_trace_analysis.checkpoint.files import open_checkpoint
from eagle_trace_analysis.replay.form import Form, Latent, form_of
from eagle_trace_analysis.replay.recorded import Recorded, choose
from eagle_trace_analysis.replay.replay import Measured, Replay
from eagle_trace_analysis.replay.weights import weights_of
from tests.support import latent_faults as plant
from tests.support.latent import draft_config
from tests.support.latent_pair import LatentDoing, run
from tests.support.numpy_target import answers, demo_target
from tests.support.planted import Planted

pytestmark = pytest.mark.slow

#: one prompt shows as much as three
PROMPTS = answers()[:1]


def recorded(case: Planted, folder: Path, dtype: str = "float32") -> tuple[Diff, Trace, Trace]:
    return run(case, folder, dtype, prompts=PROMPTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", plant.HEALTHY, ids=lambda case: case.name)
def test_a_healthy_pair_agrees_and_every_step_of_both_forms_is_recomputed(
    case: Planted, dtype: str, tmp_path: Path
) -> None:
    result, train, serve = recorded(case, tmp_path, dtype)
    assert (train.family, serve.family) == (EAGLE3_MLA, EAGLE3_MLA)
    assert result.verdict == "agree"
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    assert not result.diagnosis.unexplained
    judged = {(one.site, one.step): one for one in result.diagnosis.replay}
    for name in ("q_a", "kv_a", "q_a_norm", "kv_a_norm", "q", "q_rope", "k_rope", "context", "out"):
        for step in (0, 1, 2):
            found = judged[f"layer.0.attn.{name}", step]
            assert found.verdict == "reproduced", (name, step, found)
            # the control is the expanded form, the server's the absorbed one
            assert isinstance(found.train, Measured)
            assert isinstance(found.serve, Measured)


def test_a_draft_that_has_no_head_is_not_said_to_have_lost_it(tmp_path: Path) -> None:
    def without_head(held: dict[str, object]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del held[name]

    def with_the_targets(held: dict[str, object]) -> None:
        held["lm_head.weight"], held["d2t"] = demo_target().head, np.zeros(draft_config()["vocab_size"], np.int64)

    case = Planted(
        "no head", None, None, trained=lambda config: config.pop("draft_vocab_size"), trained_stored=without_head,
        serve_tensors=with_the_targets, train_tensors=with_the_targets,
    )  # fmt: skip
    result, _, serve = recorded(case, tmp_path)
    assert result.verdict == "agree"
    assert serve.shapes["logits"] == {(draft_config()["vocab_size"], "float32")}
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    (found,) = (one for one in result.diagnosis.causes if one.cause == "lm-head-from-target")
    assert "without a head of its own" in found.evidence


@pytest.mark.parametrize("case", plant.faults(), ids=lambda case: case.name)
def test_a_fault_is_named_at_its_site(case: Planted, tmp_path: Path) -> None:
    result, _, _ = recorded(case, tmp_path)
    assert result.diagnosis is not None
    confirmed = {one.cause: one for one in result.diagnosis.confirmed}
    assert case.cause in confirmed, result.diagnosis.unexplained
    assert set(confirmed) <= {case.cause, *plant.BESIDES.get(case.name, ())}
    assert result.frontier[0].site == case.site
    assert confirmed[case.cause].site == case.site
    assert confirmed[case.cause].fix
    assert not result.diagnosis.unexplained
    skipped = next(one for one in result.diagnosis.causes if one.cause == "qkv-order")
    assert (skipped.verdict, skipped.evidence) == ("ruled_out", "does not apply to a draft of the family eagle3-mla")


def test_steps_that_cannot_be_made_of_what_is_there_say_why(tmp_path: Path) -> None:
    _, _, serve = recorded(plant.HEALTHY[0], tmp_path)
    checkpoint = open_checkpoint(tmp_path / "trained")
    form = form_of(checkpoint.config)
    sample = Recorded(serve, choose(serve))
    weights = weights_of(checkpoint, "float32")

    def why(site: str, form: Form = form, **instead: np.ndarray) -> str:
        named = {f"layers.0.self_attn.{name}.weight": array for name, array in instead.items()}
        found = Replay(sample, form, weights.replaced(named)).recompute(f"layer.0.attn.{site}", 0)
        assert isinstance(found, str)
        return found

    def shaped(**changes: int) -> Form:
        return form_of(draft_config(**changes))

    assert "kv_b_proj is [10, 32]" in why("context", kv_b_proj=np.zeros((10, 32)))
    assert "queries of width 128 do not make 8 heads of 32" in why("context", shaped(num_attention_heads=8))
    assert "kv_a of width 48 is not a latent of 40 and a key of 16" in why("k_rope", shaped(kv_lora_rank=40))
    plain = form_of(draft_config(kv_lora_rank=None, head_dim=16))
    assert "describes no latent attention" in why("q_rope", plain)


@pytest.mark.parametrize(
    ("changes", "scale", "kind", "factor"),
    [
        ({}, 32**-0.5 * (0.1 * np.log(4) + 1) ** 2, "deepseek_yarn", 1.0),
        ({"rope_scaling": None}, 32**-0.5, "default", 1.0),
        # the class takes any scaling for its yarn, and without mscale_all_dim leaves the scores alone
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32**-0.5, "deepseek_yarn", 0.1 * np.log(4) + 1),
        ({"rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}}, 32**-0.5, "deepseek_yarn", 1.0),
    ],
)
def test_a_config_says_the_form_of_latent_attention(
    changes: dict[str, object], scale: float, kind: str, factor: float
) -> None:
    form = form_of(draft_config(**changes))
    assert form.latent == Latent(32, 16, 24)
    assert (form.heads, form.kv_heads, form.head_dim) == (4, 1, 16)
    assert form.on_scores == pytest.approx(scale, rel=1e-12)
    assert (form.rope.kind, form.rope.interleaved) == (kind, True)
    found = form.rope.frequencies(form.head_dim)
    assert found is not None
    assert found[1] == pytest.approx(factor)
    assert not form_of(draft_config(rope_interleave=False)).rope.interleaved


def test_causes_of_projections_that_latent_attention_lacks_say_so() -> None:
    assert [name for name, cause in REGISTRY.items() if cause.families] == ["qkv-order"]


def test_the_pair_is_one_that_the_targets_width_fits() -> None:
    assert demo_target().config["hidden_size"] == draft_config()["hidden_size"]
    assert LatentDoing.trainer == "reference"
