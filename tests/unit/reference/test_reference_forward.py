"""The reference forward of drafts with latent attention, against transformers' own attention and against a server's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, LlamaConfig

from eagle_trace import open_trace
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.families import EAGLE3_MLA
from eagle_trace.recording.hooks import Hooks
from eagle_trace_analysis import check, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.replay.form import form_of
from eagle_trace_reference.host import HOST
from eagle_trace_reference.load import load_draft
from eagle_trace_reference.model import LatentAttention, LatentDraft, Memory, frequencies
from eagle_trace_reference.shape import Shape, Yarn, shape_of
from eagle_trace_reference.trainer import TRAINER
from eagle_trace_training.numerics import computing_in, raise_dtype
from eagle_trace_training.published import Published
from tests.support.checkpoints import write_checkpoint
from tests.support.latent import YARN, draft_config, draft_tensors, write_draft
from tests.support.latent_faults import HEALTHY
from tests.support.latent_pair import run
from tests.support.numpy_target import answers
from tests.support.pairs import TARGET

SHAPE = Shape(
    vocabulary=50, draft_vocabulary=20, hidden=32, intermediate=48, target=32, features=3, heads=4, q_rank=24,
    kv_rank=16, nope=8, rope=16, value=12, theta=50000.0,
)  # fmt: skip
ORIGINAL = 32
#: rotation with and without scaling; factors on it that are 1, and that are not
YARNS = {
    "plain": None,
    "yarn": Yarn(4.0, ORIGINAL, mscale=1.0, mscale_all_dim=1.0),
    "yarn, mscale apart": Yarn(64.0, ORIGINAL, mscale=0.7, mscale_all_dim=1.3),
    "yarn, no mscale": Yarn(4.0, ORIGINAL),
}
ROWS = 70


def random(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        spread = torch.randn_like(parameter)
        parameter.data = 1 + 0.2 * spread if "norm" in name else spread * parameter.shape[-1] ** -0.5
    return model.requires_grad_(False)


def rope_parameters(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "default", "rope_theta": SHAPE.theta}
    given = {"rope_type": "yarn", "rope_theta": SHAPE.theta, "factor": yarn.factor, "beta_fast": 32.0, "beta_slow": 1.0,
             "original_max_position_embeddings": int(yarn.original)}  # fmt: skip
    return given | ({"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {})


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("yarn", YARNS)
def test_its_attention_is_that_of_transformers(yarn: str, interleaved: bool) -> None:
    # seconds, which every worker would take that collects this file
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    shape = replace(SHAPE, yarn=YARNS[yarn], interleaved=interleaved, eps=1e-6)
    ours = random(LatentAttention(shape))
    config = DeepseekV3Config(
        hidden_size=2 * shape.hidden, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        q_lora_rank=shape.q_rank, kv_lora_rank=shape.kv_rank, qk_nope_head_dim=shape.nope, qk_rope_head_dim=shape.rope,
        v_head_dim=shape.value, rope_parameters=rope_parameters(shape.yarn), rope_interleave=interleaved,
        max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0)
    theirs.o_proj = torch.nn.Linear(shape.heads * shape.value, shape.hidden, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(ROWS, 2 * shape.hidden), torch.arange(ROWS)
    seen = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    mask = torch.zeros(ROWS, ROWS).masked_fill(~seen, -torch.inf)
    with torch.inference_mode():
        tables = DeepseekV3RotaryEmbedding(config)(x, positions[None])
        expected, _ = theirs(x[None], tables, mask[None, None])
        found = ours(x, positions, Memory(seen, [], []))
    assert float((found - expected[0]).abs().max()) <= 1e-6 * float(expected.abs().max()) * 4
    assert float((found - expected[0]).norm() / expected.norm()) <= 1e-6


def served(model: LatentDraft, chain: list[int], root: int, features: Any) -> list[Any]:
    """The chain drafted below a root as a server does it: one token per step, keys in a cache, kv_b_proj absorbed.

    Returns the logits of each step.
    """
    shape, layer = model.shape, model.layers[0]
    attention = layer.self_attn
    absorbed = attention.kv_b_proj.weight.unflatten(0, (shape.heads, -1))
    w_k, w_v = absorbed.split([shape.nope, shape.value], dim=1)
    latents: list[Any] = []
    keys: list[Any] = []
    logits, hidden = [], None
    for step in range(len(chain) - root):
        rows = range(root + 1) if step == 0 else [root + step]
        tokens, positions = torch.tensor([chain[row] for row in rows]), torch.tensor(list(rows))
        hidden = model._projected(features[: root + 1]) if hidden is None else hidden[-1:]
        entering = torch.cat([layer.input_layernorm(model.embed_tokens(tokens)), layer.hidden_norm(hidden)], -1)
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(entering))).unflatten(-1, (shape.heads, -1))
        latent, key = attention.kv_a_proj_with_mqa(entering).split([shape.kv_rank, shape.rope], -1)
        q_nope, q_rope = q.split([shape.nope, shape.rope], -1)
        q_rope, key = attention.rotary(q_rope, key[:, None], positions)
        latents.append(attention.kv_a_layernorm(latent))
        keys.append(key[:, 0])
        cached, rotated = torch.cat(latents), torch.cat(keys)
        scores = torch.einsum("thn,hnc,sc->hts", q_nope, w_k, cached) + torch.einsum("thr,sr->hts", q_rope, rotated)
        later = torch.arange(len(cached))[None] > positions[:, None]
        weights = (scores * shape.scale).masked_fill(later, -torch.inf).softmax(-1)
        context = torch.einsum("hts,sc,hvc->thv", weights, cached, w_v)
        stream = hidden + attention.o_proj(context.flatten(1))
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        normed = model.norm(stream)
        logits.append(model.lm_head(normed)[-1])
        hidden = normed if shape.norm_output else stream
    return logits


@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "fc_norm": True}], ids=["eagle3", "eagle3.1"])
def test_its_steps_are_what_a_server_computes_absorbed_one_token_after_the_other(flags: dict[str, bool]) -> None:
    model = random(LatentDraft(replace(SHAPE, yarn=YARNS["yarn"], **flags))).double()
    lengths, steps = (9, 6), 3
    tokens = torch.randint(SHAPE.vocabulary, (sum(lengths),))
    features = torch.randn(len(tokens), 3 * SHAPE.target).double()
    documents = torch.cat([torch.full((length,), n) for n, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    seen: list[dict[str, Any]] = [{} for _ in range(steps)]
    with computing_in("float64"):
        with Hooks() as hooks:
            TRAINER.sites(hooks, model, lambda step, site, x: seen[step].__setitem__(site, x))
            model(tokens, documents, positions, features, steps)
        start = 0
        for length in lengths:
            chain, here = tokens[start : start + length].tolist(), features[start : start + length]
            for root in range(length - steps + 1):
                for step, expected in enumerate(served(model, chain[: root + steps], root, here)):
                    found = seen[step]["logits"][start + root]
                    assert float((found - expected).abs().max()) < 1e-12, (start, root, step)
            start += length


def test_a_folder_is_loaded_as_it_is_stored_and_every_site_has_the_width_its_config_says(tmp_path: Path) -> None:
    embedding = torch.randn(320, 128).numpy()
    folder = write_draft(tmp_path / "draft", lambda held: held.update({"embed_tokens.weight": embedding}))
    draft = load_draft(folder, None, "float32", "cpu")
    assert draft.layer_ids == [2, 4, 5]
    assert (draft.fused_width, draft.hidden_size, draft.warnings) == (384, 128, [])
    seen: dict[str, tuple[int, ...]] = {}
    with Hooks() as hooks, computing_in("float32"):
        TRAINER.sites(hooks, draft.model, lambda _, site, x: seen.setdefault(site, tuple(x.shape)))
        draft.model(*(torch.arange(3) * n for n in (1, 0, 1)), torch.randn(3, 384), 1)
    widths = {"q_a": 48, "q_a_norm": 48, "kv_a": 48, "kv_a_norm": 32, "q": 128, "q_rope": 64, "k_rope": 16,
              "context": 96, "out": 128, "residual": 128}  # fmt: skip
    assert {site[13:]: shape[1] for site, shape in seen.items() if site.startswith("layer.0.attn.")} == widths
    low = raise_dtype(draft.model, "bfloat16")
    assert low.layers[0].self_attn.rotary.frequencies.dtype == torch.float32, "rounding these would turn all rows"


def with_embedding(held: dict[str, Any]) -> None:
    held["embed_tokens.weight"] = held["lm_head.weight"][:1].repeat(320, axis=0)


@pytest.mark.parametrize(
    ("latent_target", "named", "inputs"),
    [(True, [1, 29, 57], [2, 30, 58]), (True, [2, 30, 58], [2, 30, 58]), (False, [2, 30, 58], [3, 31, 59])],
)
def test_target_layers_are_read_as_published_drafts_name_them(
    tmp_path: Path, latent_target: bool, named: list[int], inputs: list[int]
) -> None:
    kind = DeepseekV3Config if latent_target else LlamaConfig
    kind(num_hidden_layers=61, hidden_size=128).save_pretrained(tmp_path / "target")

    def loaded(ids: list[int]) -> Any:
        asked = {"eagle_aux_hidden_state_layer_ids": ids}
        tensors = draft_tensors(draft_config())
        with_embedding(tensors)
        folder = write_checkpoint(tmp_path / "draft", draft_config(eagle_config=asked), tensors)
        return load_draft(folder, tmp_path / "target", "float32", "cpu")

    assert loaded(named).layer_ids == inputs
    with pytest.raises(CheckpointError, match=r"the target .* has 61 layers"):
        loaded([*named[:2], 61])
    with pytest.raises(CheckpointError, match=r"names the target layers .*, and its fc takes 3 of width 128"):
        loaded(named[:2])


def test_one_feature_that_is_asked_for_beside_an_fc_of_three_is_said(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    folder = write_draft(tmp_path, with_embedding, eagle_config=ids | {"use_aux_hidden_state": False})
    draft = load_draft(folder, None, "float32", "cpu")
    assert draft.layer_ids == [2, 4, 5]
    assert "use_aux_hidden_state false, but fc takes 3 target layers" in draft.warnings[0]


def without(name: str) -> Any:
    return lambda held: held.pop(name)


@pytest.mark.parametrize(
    ("changes", "edit", "said"),
    [
        ({"q_lora_rank": None}, None, "q_lora_rank in the config of"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None, r"rotates by linear \(the class has yarn, "),
        ({"rope_scaling": [4.0]}, None, "rope_scaling in the config of .* is .*, not an object"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, None, "rope_scaling.factor in .* is '4', not a number"),
        ({"rope_theta": 0.0}, None, "rope_theta in the config of .* is 0.0, not a number above 0"),
        ({"rope_theta": 1.0}, None, "rope_theta in the config of .* is 1.0, not a number above 1"),
        ({"rms_norm_eps": "small"}, None, "rms_norm_eps in the config of"),
        ({"num_hidden_layers": 2}, None, "counts 2 layers, not one"),
        ({"hidden_act": "gelu"}, None, "activates by 'gelu'"),
        ({"attention_bias": True}, None, "has attention_bias"),
        ({"qk_rope_head_dim": 15}, None, "does not split in two halves"),
        ({"kv_lora_rank": 40}, "keep", r"kv_a_layernorm.weight in .* is \[32\], its config makes \[40\]"),
        ({}, without("fc.weight"), "has no fc.weight"),
        ({}, without("layers.0.self_attn.kv_b_proj.weight"), "lacks layers.0.self_attn.kv_b_proj.weight"),
        ({}, without("embed_tokens.weight"), "has no embed_tokens.weight: give the target"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "kv_lora_rank": None}, "keep", "is a draft of class"),
        ({}, lambda held: held.update({"fc.weight": held["fc.weight"].astype(np.int8)}), "holds quantised tensors"),
    ],
)  # fmt: skip
def test_what_it_cannot_compute_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], edit: Any, said: str
) -> None:
    tensors = draft_tensors(draft_config())
    with_embedding(tensors)
    if callable(edit):
        edit(tensors)
    folder = write_checkpoint(tmp_path / "draft", draft_config(**changes), tensors)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_draft(folder, None, "float32", "cpu")
    assert "\n" not in str(caught.value)


def edited(name: str, edit: Any) -> Any:
    return lambda held: held.update({name: edit(held[name])})


#: what no server could compute, and `eagle-trace check` says so; words that both say it with
UNSERVABLE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "d2t beyond the target": ({}, edited("d2t", lambda one: one + 10**6), "0 of 80 target ids in range"),
    "d2t of fractions": ({}, edited("d2t", lambda one: one.astype(np.float32)), "d2t .*is stored as"),
    "no d2t": ({}, without("d2t"), "but the draft has 80 ids for 320 target ids: draft ids would be taken for target"),
    "a d2t of another vocabulary": ({}, edited("d2t", lambda one: one[:-3]), "has 77 entries"),
    "yarn without a factor": ({"rope_scaling": {"type": "yarn"}}, None, "rope_scaling of the form yarn has no factor"),
    "a factor of 0": ({"rope_scaling": {"type": "yarn", "factor": 0}}, None, "factor .*is 0"),
    "a factor below 0": ({"rope_scaling": {"type": "yarn", "factor": -2.0}}, None, "factor .*is -2.0"),
    "a factor beyond float32": ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, None, "factor .*is 1e.300"),
    "frequencies that overflow": (
        {"rope_scaling": YARN | {"factor": 1e-300}},
        None,
        "cosines and sines are not numbers",
    ),
    "an eps beyond float32": ({"rms_norm_eps": 1e300}, None, "rms_norm_eps .*is 1e.300"),
    "a word for a flag": ({"rope_interleave": "no"}, None, "rope_interleave"),
    "a negative eps": ({"rms_norm_eps": -1e-5}, None, "rms_norm_eps .*is -1e-05"),
    "no heads": ({"num_attention_heads": 0}, None, "num_attention_heads"),
    "a negative width": ({"v_head_dim": -1}, None, "v_head_dim .*is -1"),
    "a tie beside ids of its own": ({"tie_word_embeddings": True}, None, "the target's embedding"),
}


@pytest.mark.parametrize("name", UNSERVABLE)
def test_what_check_fails_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    changes, edit, words = UNSERVABLE[name]
    tensors = draft_tensors(draft_config())
    with_embedding(tensors)
    if edit is not None:
        edit(tensors)
    folder = write_checkpoint(tmp_path / "draft", draft_config(**changes), tensors)
    failed = [one.evidence for one in check(folder).findings if one.status == "fail"]
    assert re.search(words, " ".join(failed)), failed
    with pytest.raises(CheckpointError, match=words) as refused:
        HOST.record(draft=folder, target=TARGET, prompts=tmp_path / "prompts.jsonl", out=tmp_path / "out", device="cpu")
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2
    assert not (tmp_path / "out").exists()


def test_weights_of_twice_the_width_are_read_as_any_others(tmp_path: Path) -> None:
    tensors = draft_tensors(draft_config())
    with_embedding(tensors)
    wide = {name: one.astype(np.float64) if one.dtype == np.float32 else one for name, one in tensors.items()}
    folders = [write_checkpoint(tmp_path / name, draft_config(), held) for name, held in (("a", tensors), ("b", wide))]
    narrow, widened = (load_draft(folder, None, "float32", "cpu").model.state_dict() for folder in folders)
    assert all(torch.equal(narrow[name], widened[name]) for name in narrow)


def write_draft_of_llama(folder: Path) -> Path:
    tensors = draft_tensors(draft_config())
    return write_checkpoint(
        folder, draft_config(architectures=["LlamaForCausalLMEagle3"], kv_lora_rank=None), tensors
    )  # fmt: skip


def test_it_takes_drafts_of_its_class_alone_and_trains_nothing(tmp_path: Path) -> None:
    assert HOST.takes(write_draft(tmp_path / "draft"))
    assert HOST.takes(write_draft(tmp_path / "named otherwise", architectures=None))
    assert not HOST.takes(write_draft_of_llama(tmp_path / "llama"))
    assert not HOST.takes(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="trains nothing"):
        TRAINER.live(None)


def test_it_agrees_with_a_server_that_absorbs_in_numpy_on_that_servers_tokens(tmp_path: Path) -> None:
    """Features from the target, chains replayed, floors measured, parameters compared: a recording as it is made."""
    _, _, serve = run(HEALTHY[0], tmp_path / "pair", prompts=answers()[:2])
    out = tmp_path / "train.trace"
    HOST.record(draft=tmp_path / "pair" / "trained", target=TARGET, replay=serve.path, out=out, device="cpu")
    train = open_trace(out)
    assert train.manifest.host == "reference"
    assert "own reference" in train.manifest.changes[0]
    assert "not a trainer's" in train.manifest.changes[0]
    assert train.manifest.draft["layer_ids"] == [2, 4, 5]
    assert train.family is serve.family is EAGLE3_MLA
    assert train.table("floors").num_rows > 3 * 20
    result = diagnosed(diff(train, serve), train, serve)
    assert result.coverage.matched == len(serve.rows)
    assert result.verdict == "agree"
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    judged = {(one.site, one.step): one.verdict for one in result.diagnosis.replay}
    assert set(judged.values()) == {"reproduced"}
    assert {("layer.0.attn.context", step) for step in range(3)} <= set(judged)


SCALINGS = st.none() | st.fixed_dictionaries(
    {"type": st.sampled_from(["yarn", "deepseek_yarn"]), "factor": st.floats(1.0, 80.0)},
    optional={
        "original_max_position_embeddings": st.sampled_from([16, 128, 4096, 32768]), "beta_fast": st.just(32.0),
        "beta_slow": st.floats(0.5, 2.0), "mscale": st.floats(0.1, 2.0), "mscale_all_dim": st.floats(0.0, 2.0),
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    scaling=SCALINGS,
    theta=st.none() | st.floats(2.0, 1e7),
    rope=st.sampled_from([8, 16, 64]),
    interleave=st.none() | st.booleans(),
    as_parameters=st.booleans(),
    beside=st.none() | st.just(2048),
)
def test_a_config_means_the_same_to_the_reference_forward_and_to_the_recomputed_steps(
    scaling: dict[str, Any] | None, theta: float | None, rope: int, interleave: bool | None, as_parameters: bool,
    beside: int | None,
) -> None:  # fmt: skip
    changes: dict[str, Any] = {"qk_rope_head_dim": rope, "rope_interleave": interleave, "rope_theta": theta}
    changes |= {"rope_scaling": scaling, "original_max_position_embeddings": beside}
    if as_parameters:
        # transformers 5 writes them so
        own = {"rope_type": "default"} if scaling is None else {"rope_type": "yarn", **scaling}
        own.pop("type", None)
        changes |= {"rope_scaling": None, "rope_theta": None}
        changes["rope_parameters"] = own | ({} if theta is None else {"rope_theta": theta})
    config = draft_config(**changes)
    shape = shape_of(Published(Path("draft"), config, {"fc.weight": torch.empty(128, 384)}))
    form = form_of(config)
    assert form.latent is not None
    assert (form.head_dim, form.latent.nope, form.rope.interleaved) == (shape.rope, shape.nope, shape.interleaved)
    assert form.on_scores == pytest.approx(shape.scale, rel=1e-12)
    found = form.rope.frequencies(form.head_dim)
    assert found is not None
    assert found[1] == pytest.approx(shape.yarn.on_rotation if shape.yarn is not None else 1.0, rel=1e-12)
    assert frequencies(shape).numpy() == pytest.approx(found[0], rel=2e-6, abs=1e-12)
