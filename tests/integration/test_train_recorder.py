"""The train recorder against speculators itself, and against the forward written out from the checkpoint.

`check_step` recomputes every site from what was recorded before it and from the checkpoint's weights, without
speculators: what agrees with it is where the sites say it is.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from eagle_trace.errors import CheckpointError, EagleTraceError, HostError, OutputExistsError, UsageError
from eagle_trace.reader import Trace, open_trace
from eagle_trace.selection import Selection

pytest.importorskip("speculators")

from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM

from eagle_trace_speculators import load, trainer
from eagle_trace_speculators.host import HOST
from eagle_trace_training import numerics, session
from tests.support.tiny_speculators import (
    HIDDEN,
    LAYER_IDS,
    SHAPE,
    Pair,
    random_prompts,
    write_pair,
    write_prompts,
    write_serve_trace,
    write_target,
)

pytestmark = pytest.mark.integration

PROMPTS = random_prompts([9, 5, 13])
STEPS = 3
HEADS, KV_HEADS, HEAD = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
EPS = SHAPE["rms_norm_eps"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all_flags": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "two_layers": {"draft_layers": 2, "norm_before_residual": True},
    "qwen3": {"qwen3": True},
}


def run(pair: Pair, out: Path, **options: Any) -> Trace:
    given: dict[str, Any] = {"target": pair.target, "draft": pair.draft, "out": out, "device": "cpu"}
    return open_trace(HOST.record(**given | options))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


class Table:
    """Rows of a trace by (prompt, root, path)."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sites: dict[str, dict[tuple[int, int, tuple[int, ...]], Any]] = {}

    def site(self, name: str) -> dict[tuple[int, int, tuple[int, ...]], Any]:
        if name not in self._sites:
            keys = self._trace.keys(name)
            found = zip(keys.prompt_id.tolist(), keys.root.tolist(), keys.paths(), strict=True)
            self._sites[name] = dict(zip(found, self._trace.values(name), strict=True))
            assert len(self._sites[name]) == len(keys), f"{name}: a row was recorded twice"
        return self._sites[name]

    def stack(self, name: str, step: int) -> Tensor:
        rows = self.site(name)
        return torch.from_numpy(np.stack([rows[key] for key in sorted(rows) if len(key[2]) == step]))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Half-split RoPE, one complex number at a time."""
    heads = x.reshape(len(x), -1, HEAD)
    theta = 10000.0 ** (-torch.arange(HEAD // 2, dtype=torch.float64) * 2 / HEAD)
    angle = positions.double()[:, None, None] * theta
    turned = torch.complex(heads[..., : HEAD // 2].double(), heads[..., HEAD // 2 :].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], dim=-1).float().reshape(len(x), -1)


def close(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    assert error < 2e-6, f"{name}: {error}"


def check_step(table: Table, weights: dict[str, Tensor], step: int, config: dict[str, Any]) -> None:
    """Every site of a step from the sites before it."""
    at = lambda site: table.stack(site, step)  # noqa: E731
    keys = sorted(key for key in table.site("embed") if len(key[2]) == step)
    tokens = [key[2][-1] if step else PROMPTS[key[0]][key[1] + 1] for key in keys]
    positions = torch.tensor([key[1] + step for key in keys])
    close("embed", at("embed"), weights["embed_tokens.weight"][tokens])
    if step:
        previous = table.site("carry")
        carried = torch.from_numpy(np.stack([previous[prompt, root, path[:-1]] for prompt, root, path in keys]))
        assert torch.equal(at("hidden"), carried)
    else:
        fused = at("fused")
        if config["norm_before_fc"]:
            fused = rms(fused, weights["input_norm.weight"])
        if config["fc_norm"]:
            parts = [rms(part, weights[f"fc_norm.{k}.weight"]) for k, part in enumerate(fused.chunk(3, -1))]
            fused = torch.cat(parts, -1)
        close("fc.in", at("fc.in"), fused)
        close("fc.out", at("fc.out"), at("fc.in") @ weights["fc.weight"].T)
        assert torch.equal(at("hidden"), at("fc.out"))
    stream = at("hidden")
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for n in range(layers):
        stream = check_layer(table, weights, step, n, stream, positions, config)
    close("norm", at("norm"), rms(stream, weights["norm.weight"]))
    assert torch.equal(at("carry"), at("norm") if config["norm_output"] else stream)
    close("logits", at("logits"), at("norm") @ weights["lm_head.weight"].T)


def check_layer(
    table: Table,
    weights: dict[str, Tensor],
    step: int,
    n: int,
    stream: Tensor,
    positions: Tensor,
    config: dict[str, Any],
) -> Tensor:
    """Every site of a layer but the context; returns the recorded output."""
    at = lambda site: table.stack(f"layer.{n}.{site}", step)  # noqa: E731
    w = lambda name: weights[f"layers.{n}.{name}.weight"]  # noqa: E731
    if n == 0:
        close("embed_norm", at("embed_norm"), rms(table.stack("embed", step), w("input_layernorm")))
        close("hidden_norm", at("hidden_norm"), rms(stream, w("hidden_norm")))
        into = torch.cat([at("embed_norm"), at("hidden_norm")], -1)
        residual = at("hidden_norm") if config["norm_before_residual"] else stream
    else:
        close("hidden_norm", at("hidden_norm"), rms(stream, w("input_layernorm")))
        into, residual = at("hidden_norm"), stream
    for part in ("q", "k"):
        projected = into @ w(f"self_attn.{part}_proj").T
        if f"layers.{n}.self_attn.{part}_norm.weight" in weights:
            heads = projected.reshape(len(projected), -1, HEAD)
            projected = rms(heads, w(f"self_attn.{part}_norm")).reshape(len(projected), -1)
        close(part, at(f"attn.{part}"), projected)
        close(f"{part}_rope", at(f"attn.{part}_rope"), rotate(at(f"attn.{part}"), positions))
    close("v", at("attn.v"), into @ w("self_attn.v_proj").T)
    close("attn.out", at("attn.out"), at("attn.context") @ w("self_attn.o_proj").T)
    close("residual", at("attn.residual"), residual + at("attn.out"))
    close("mlp.norm", at("mlp.norm"), rms(at("attn.residual"), w("post_attention_layernorm")))
    close("gate", at("mlp.gate"), at("mlp.norm") @ w("mlp.gate_proj").T)
    close("up", at("mlp.up"), at("mlp.norm") @ w("mlp.up_proj").T)
    close("act", at("mlp.act"), functional.silu(at("mlp.gate")) * at("mlp.up"))
    close("mlp.out", at("mlp.out"), at("mlp.act") @ w("mlp.down_proj").T)
    close("out", at("out"), at("attn.residual") + at("mlp.out"))
    return at("out")


def check_context(table: Table, n: int) -> None:
    """Attention: step-0 keys up to the root, then the row's own keys of its steps."""
    at = f"layer.{n}.attn"
    q, k, v = table.site(f"{at}.q_rope"), table.site(f"{at}.k_rope"), table.site(f"{at}.v")
    for (prompt, root, path), found in table.site(f"{at}.context").items():
        seen = [(prompt, p, ()) for p in range(root + 1)]
        seen += [(prompt, root, path[:s]) for s in range(1, len(path) + 1)]
        key = torch.tensor(np.stack([k[row] for row in seen])).reshape(len(seen), KV_HEADS, HEAD)
        value = torch.tensor(np.stack([v[row] for row in seen])).reshape(len(seen), KV_HEADS, HEAD)
        query = torch.tensor(q[prompt, root, path]).reshape(HEADS, HEAD)
        group = HEADS // KV_HEADS
        scores = torch.einsum("hd,shd->hs", query, key.repeat_interleave(group, 1)) / HEAD**0.5
        context = torch.einsum("hs,shd->hd", scores.softmax(-1), value.repeat_interleave(group, 1))
        close("context", torch.tensor(found), context.flatten())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_site_follows_from_the_sites_before_it_and_the_checkpoint(
    variant: str, tmp_path: Path, prompts: Path
) -> None:
    pair = write_pair(tmp_path, **VARIANTS[variant])
    trace = run(pair, tmp_path / "trace", prompts=prompts, steps=STEPS)
    config = json.loads((pair.draft / "config.json").read_text())
    table, weights = Table(trace), pair.weights()
    for step in range(STEPS):
        check_step(table, weights, step, config)
    for n in range(config["transformer_layer_config"]["num_hidden_layers"]):
        check_context(table, n)
    assert not any(trace.statistics(site).nonfinite.any() for site in trace.sites)
    expected = sum(len(ids) - 1 - step for ids in PROMPTS for step in range(STEPS))
    assert len(trace.rows) == expected
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert trace.manifest.draft[flag] == VARIANTS[variant].get(flag, False)


def test_features_are_the_target_hidden_states_that_speculators_means(
    pair: Pair, tmp_path: Path, prompts: Path
) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    last: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0][0]))
    table = Table(trace)
    for number, ids in enumerate(PROMPTS):
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        layers = [
            states[1][0],
            states[2][0],
            last[-1],
        ]  # layer id 4 of 4 layers: the output before the final norm
        for root in range(len(ids) - 1):
            for k, layer in enumerate(layers):
                close("feature", torch.tensor(table.site(f"target.hidden.{k}")[number, root, ()]), layer[root])
            fused = torch.cat([layer[root] for layer in layers])
            close("fused", torch.tensor(table.site("fused")[number, root, ()]), fused)


def features_of(pair: Pair, prompts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """Random features of the right width: the draft does not know where they come from."""
    draw = np.random.default_rng(5)
    width = len(LAYER_IDS) * HIDDEN
    return [draw.standard_normal((len(ids) - 1, width)).astype(np.float32) for ids in prompts]


CHAINS = {
    0: [(3, (7, 8)), (7, (9, 10)), (2, (PROMPTS[0][4], 11))],
    1: [(3, (12,)), (1, (PROMPTS[1][3], PROMPTS[1][4]))],
    2: [(0, (1, 2)), (11, (3, 4)), (11, (3, 5)), (11, (6,))],
}


@pytest.mark.parametrize("variant", ["plain", "all_flags", "two_layers"])
def test_a_replayed_chain_equals_a_forward_of_its_own(variant: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, **VARIANTS[variant])
    fused = features_of(pair, PROMPTS)
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, CHAINS, fused=fused)
    trace = run(pair, tmp_path / "trace", target=None, replay=serve, features="serve")
    table = Table(trace)
    wanted = {
        (n, root, path[:s]) for n, chains in CHAINS.items() for root, path in chains for s in range(1, len(path) + 1)
    }
    wanted |= {(n, root, ()) for n, ids in enumerate(PROMPTS) for root in range(len(ids) - 1)}
    assert set(table.site("logits")) == wanted

    config = Eagle3SpeculatorConfig.from_pretrained(pair.draft)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(pair.target)
    model = Eagle3DraftModel.from_pretrained(pair.draft, config=config).eval()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: logits.append(output[0]))
    for prompt, root, path in sorted(wanted):
        logits.clear()
        tokens = torch.tensor([[*PROMPTS[prompt][1 : root + 2], *path]])
        given = torch.zeros(1, tokens.shape[1], len(LAYER_IDS) * HIDDEN)
        given[0, : root + 1] = torch.from_numpy(fused[prompt][: root + 1])
        with torch.no_grad():
            # positions as speculators' own default has them, from 1: rotation knows only distances
            model(given, tokens, torch.zeros_like(tokens), ttt_steps=len(path) + 1)
        found = torch.tensor(table.site("logits")[prompt, root, path])
        assert float((found - logits[-1][root]).abs().max()) < 2e-5


def test_replayed_features_are_the_servers_bit_for_bit_and_their_floor_is_zero(pair: Pair, tmp_path: Path) -> None:
    fused = features_of(pair, PROMPTS)
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, CHAINS, fused=fused)
    trace = run(pair, tmp_path / "trace", target=None, replay=serve, features="serve")
    table = Table(trace)
    for n, rows in enumerate(fused):
        assert np.array_equal(table.stack("fused", 0)[[key[0] == n for key in sorted(table.site("fused"))]], rows)
    floors = trace.floors[trace.floors.step == 0].set_index("site")
    assert floors.loc["fused", "rho_max"] == 0
    assert 0 < floors.loc["fc.out", "rho_max"] < 1e-6
    assert trace.prompts.prompt_key.tolist() == ["key-0", "key-1", "key-2"]
    assert [list(ids) for ids in trace.prompts.token_ids] == PROMPTS
    assert trace.manifest.target["path"] == "/served/target"


def test_packing_changes_nothing_beyond_rounding(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, CHAINS, fused=features_of(pair, PROMPTS))
    packed = run(pair, tmp_path / "packed", target=None, replay=serve, features="serve")
    monkeypatch.setattr(session, "row_budget", lambda *_: 1)
    alone = run(pair, tmp_path / "alone", target=None, replay=serve, features="serve")
    assert packed.calls.batch_size.max() > 1
    assert alone.calls.batch_size.max() == 1
    assert len(packed.rows) == len(alone.rows)
    first, second = Table(packed), Table(alone)
    for site in packed.sites:
        for key, values in first.site(site).items():
            other = second.site(site)[key]
            assert np.linalg.norm(values - other) <= 2e-6 * np.linalg.norm(other), (site, key)


def test_rows_that_saw_another_branch_are_counted_and_not_replayed(pair: Pair, tmp_path: Path) -> None:
    crossed = [(0, 3, (7, 9)), (1, 2, (5, 6))]
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, CHAINS, fused=features_of(pair, PROMPTS), crossed=crossed)
    trace = run(pair, tmp_path / "trace", target=None, replay=serve, features="serve")
    assert not {(0, 3, (7, 9)), (1, 2, (5, 6))} & set(Table(trace).site("logits"))
    assert trace.manifest.not_materialised[0]["rows"] == "2 rows of the replayed trace"


def test_steps_cut_a_replay_short(pair: Pair, tmp_path: Path) -> None:
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, CHAINS, fused=features_of(pair, PROMPTS))
    trace = run(pair, tmp_path / "trace", target=None, replay=serve, features="serve", steps=2)
    assert trace.rows.step.max() == 1
    assert trace.manifest.settings["steps"] == 2


def test_the_last_roots_that_a_server_never_reached_are_left_out(pair: Pair, tmp_path: Path) -> None:
    fused = features_of(pair, PROMPTS)
    serve = write_serve_trace(tmp_path / "serve", PROMPTS, {}, fused=fused, without_roots=[(0, 7), (0, 6)])
    table = Table(run(pair, tmp_path / "trace", target=None, replay=serve, features="serve"))
    assert sorted(root for prompt, root, _ in table.site("logits") if prompt == 0) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("bfloat16", 1e-4, 0.1), ("float16", 1e-5, 0.02), ("float32", 1e-9, 1e-5)]
)
def test_floors_are_there_for_every_site_and_as_small_as_the_dtype(
    dtype: str, low: float, high: float, pair: Pair, tmp_path: Path, prompts: Path
) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts, dtype=dtype)
    floors = trace.floors
    measured = {(site, step) for site, step in zip(floors.site, floors.step, strict=True)}
    assert measured == {(site, step) for site in trace.sites for step in set(trace.keys(site).step.tolist())}
    for entry in floors.itertuples():
        assert entry.rows == (trace.keys(entry.site).step == entry.step).sum()
        assert entry.rho_median <= entry.rho_p99 <= entry.rho_max
        if entry.site == "embed":
            assert entry.rho_max == 0
        else:
            assert low < entry.rho_median < high, entry
            assert low < entry.channel_median < high, entry
    assert {data.dtype for site in trace.sites for data in trace.site_data(site)} == {dtype}


def test_a_bfloat16_draft_is_recorded_as_bfloat16_with_its_exact_weights(tmp_path: Path, prompts: Path) -> None:
    pair = write_pair(tmp_path, dtype=torch.bfloat16)
    trace = run(pair, tmp_path / "trace", prompts=prompts)
    assert trace.manifest.dtype == "bfloat16"
    embedding = pair.weights()["embed_tokens.weight"].float()
    for (prompt, root, path), found in Table(trace).site("embed").items():
        token = path[-1] if path else PROMPTS[prompt][root + 1]
        assert np.array_equal(found, embedding[token].numpy())


def test_rotation_frequencies_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, dtype=torch.bfloat16)
    model = load.load_draft(pair.draft, None, "bfloat16", "cpu").model
    exact = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    assert torch.allclose(model.rotary_emb.inv_freq.double(), exact, rtol=1e-6)


def test_a_float64_reference_takes_no_detour_through_float32(pair: Pair) -> None:
    model = numerics.raise_dtype(load.load_draft(pair.draft, None, "float32", "cpu").model, "float64")
    layer = model.layers[0]
    states = torch.randn(1, 6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100, 106)[None]
    with numerics.computing_in("float64"):
        normed = layer.hidden_norm(states)
        cos, _ = model.rotary_emb(states, positions)
        weights = functional.softmax(states, dim=-1, dtype=torch.float32)
    assert torch.allclose(normed, rms(states, layer.hidden_norm.weight), rtol=0, atol=1e-14)
    angles = positions[0, :, None].double() * model.rotary_emb.inv_freq.double()
    assert torch.allclose(cos[0, :, : HEAD // 2], angles.cos(), rtol=0, atol=1e-14)
    assert torch.allclose(weights, states.softmax(-1), rtol=0, atol=1e-15)


def test_topk_is_sorted_and_mapped_to_target_ids(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts)
    d2t = pair.weights()["d2t"].numpy()
    topk = trace.topk
    assert (topk.target_id == topk.draft_id + d2t[topk.draft_id]).all()
    table = Table(trace).site("logits")
    for (prompt, root, step), rows in topk[topk.step == 0].groupby(["prompt_id", "root", "step"]):
        logits = table[prompt, root, ()]
        assert len(rows) == 10
        assert rows.draft_id.tolist() == np.argsort(-logits, kind="stable")[:10].tolist()
        assert step == 0


def test_without_a_draft_vocabulary_draft_ids_are_target_ids(tmp_path: Path, prompts: Path) -> None:
    trace = run(write_pair(tmp_path, full_vocab=True), tmp_path / "trace", prompts=prompts)
    assert (trace.topk.target_id == trace.topk.draft_id).all()
    assert "d2t" not in set(trace.params.name)


def test_params_are_the_checkpoints_tensors(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    params = run(pair, tmp_path / "trace", prompts=prompts).params.set_index("canonical_name")
    weights = pair.weights()
    assert set(params.index) == set(weights)
    for name, tensor in weights.items():
        assert params.loc[name, "norm"] == pytest.approx(float(tensor.double().norm()))
        assert list(params.loc[name, "shape"]) == list(tensor.shape)
    assert params.in_checkpoint.all()
    assert not params.nonfinite.any()


def test_calls_say_what_was_run(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts)
    assert trace.calls.role.tolist() == ["draft"] * 3
    assert trace.calls["mode"].tolist() == ["train"] * 3
    assert trace.calls.tokens.tolist() == [sum(len(ids) - 1 for ids in PROMPTS)] * 3
    assert trace.shapes["fused"] == {(len(LAYER_IDS) * HIDDEN, "float32")}
    assert set(trace.shapes) == set(trace.sites)


def test_positions_are_the_servers(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts)
    assert (trace.rows.position == trace.rows.root + trace.rows.step).all()
    assert any("positions" in change for change in trace.manifest.changes)


@pytest.mark.parametrize("level", ["shapes", "stats", "sketch"])
def test_lower_levels_keep_less(level: str, pair: Pair, tmp_path: Path, prompts: Path) -> None:
    trace = run(pair, tmp_path / "trace", prompts=prompts, level=level)
    assert trace.level == level
    assert set(trace.shapes) >= {"fc.out", "logits"}
    assert (level == "shapes") == (not trace.site_data("fc.out"))


def test_two_recordings_are_the_same_bytes(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    first, second = (run(pair, tmp_path / name, prompts=prompts) for name in ("a", "b"))
    for site in first.sites:
        assert np.array_equal(first.values(site), second.values(site)), site
    assert first.floors.equals(second.floors)


# ---- the host is left as it was


def _hooks_left(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("failing", [False, True])
def test_no_hook_is_left_behind(
    failing: bool, pair: Pair, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    rotation = llama.apply_rotary_pos_emb
    models: list[Any] = []
    original = load.load_draft

    def remember(*args: Any) -> Any:
        draft = original(*args)
        models.append(draft.model)
        if failing:
            draft.model.lm_head.forward = lambda *_: 1 / 0
        return draft

    monkeypatch.setattr(trainer, "TRAINER", replace(trainer.TRAINER, load=remember))
    if failing:
        with pytest.raises(ZeroDivisionError):
            run(pair, tmp_path / "trace", prompts=prompts)
        assert not (tmp_path / "trace" / "manifest.json").exists()
    else:
        run(pair, tmp_path / "trace", prompts=prompts)
    assert len(models) == 1
    assert _hooks_left(models[0]) == 0
    assert llama.apply_rotary_pos_emb is rotation


def test_a_compiled_forward_is_run_as_it_was_written() -> None:
    def forward() -> int:
        return 3

    assert load.uncompiled(torch.compile(forward)) is forward
    assert load.uncompiled(forward) is forward


# ---- features from speculators' training data


def write_training_data(
    folder: Path, prompts: list[list[int]], *, layers: int = len(LAYER_IDS), extra: int = 0
) -> Path:
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(2)
    for n, ids in enumerate(prompts):
        states = torch.randn(len(ids) + extra, layers + 1, HIDDEN, generator=draw)
        tokens = torch.tensor([*ids, *[1] * extra])
        save_file({"hidden_states": states, "token_ids": tokens}, folder / f"hs_{len(prompts) - n}.safetensors")
    return folder


@pytest.mark.parametrize("extra", [0, 4])
def test_stored_features_are_found_by_their_tokens(extra: int, pair: Pair, tmp_path: Path, prompts: Path) -> None:
    folder = write_training_data(tmp_path / "data" / "hidden_states", PROMPTS, extra=extra)
    trace = run(pair, tmp_path / "trace", target=None, prompts=prompts, features=str(folder.parent))
    table = Table(trace).site("fused")
    for n, ids in enumerate(PROMPTS):
        states = load_file(folder / f"hs_{len(PROMPTS) - n}.safetensors")["hidden_states"]
        for root in range(len(ids) - 1):
            assert np.array_equal(table[n, root, ()], states[root, :-1].flatten().numpy())


# ---- what can be wrong


def lose(pair: Pair, folder: Path, *names: str) -> Pair:
    """A copy of a pair whose draft lacks tensors."""
    shutil.copytree(pair.draft, folder)
    weights = {name: tensor for name, tensor in pair.weights().items() if name not in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Pair(pair.target, folder)


def test_embedding_and_head_that_are_not_stored_come_from_the_target(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    lacking = lose(pair, tmp_path / "draft", "embed_tokens.weight", "lm_head.weight")
    trace = run(lacking, tmp_path / "trace", prompts=prompts)
    assert trace.manifest.draft["missing_keys"] == ["embed_tokens.weight", "lm_head.weight"]
    assert sum("taken from the target" in warning for warning in trace.manifest.warnings) == 2
    params = trace.params.set_index("name")
    assert not params.loc["lm_head.weight", "in_checkpoint"]
    assert not params.nonfinite.any()
    kept = pair.weights()["d2t"] + torch.arange(len(pair.weights()["d2t"]))
    head = load_file(pair.target / "model.safetensors")["lm_head.weight"][kept]
    assert params.loc["lm_head.weight", "norm"] == pytest.approx(float(head.double().norm()))


def test_a_layer_weight_that_is_not_stored_is_a_warning(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    trace = run(lose(pair, tmp_path / "draft", "layers.0.hidden_norm.weight"), tmp_path / "trace", prompts=prompts)
    assert any("layers.0.hidden_norm.weight" in warning for warning in trace.manifest.warnings)
    assert not trace.params.set_index("name").loc["layers.0.hidden_norm.weight", "in_checkpoint"]


def test_nan_weights_are_loud(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "draft")
    weights = pair.weights()
    weights["lm_head.weight"][0, :3] = torch.nan
    save_file(weights, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    trace = run(Pair(pair.target, tmp_path / "draft"), tmp_path / "trace", prompts=prompts)
    assert trace.params.set_index("name").loc["lm_head.weight", "nonfinite"] == 3
    assert any("lm_head.weight holds 3 values" in warning for warning in trace.manifest.warnings)
    assert trace.statistics("logits").nonfinite.all()


def _flat(pair: Pair, folder: Path) -> dict[str, Any]:
    config = json.loads((pair.draft / "config.json").read_text())
    flat = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {},
        **config["transformer_layer_config"],
    }
    return {"draft": _with_config(pair, folder, flat)}


def _with_config(pair: Pair, folder: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(pair.draft, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _changed(**changes: Any) -> Callable[[Pair, Path], dict[str, Any]]:
    def options(pair: Pair, folder: Path) -> dict[str, Any]:
        config = json.loads((pair.draft / "config.json").read_text())
        return {"draft": _with_config(pair, folder, config | changes)}

    return options


def _layer(**changes: Any) -> Callable[[Pair, Path], dict[str, Any]]:
    def options(pair: Pair, folder: Path) -> dict[str, Any]:
        config = json.loads((pair.draft / "config.json").read_text())
        config["transformer_layer_config"] |= changes
        return {"draft": _with_config(pair, folder, config)}

    return options


def _tensor(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Pair, Path], dict[str, Any]]:
    def options(pair: Pair, folder: Path) -> dict[str, Any]:
        shutil.copytree(pair.draft, folder)
        held = load_file(folder / "model.safetensors")
        save_file(held | {name: edit(held[name])}, folder / "model.safetensors", {"format": "pt"})
        return {"draft": folder}

    return options


def _d2t(edit: Callable[[Tensor], Tensor]) -> Callable[[Pair, Path], dict[str, Any]]:
    return _tensor("d2t", edit)


def _replayed(**options: Any) -> Callable[[Pair, Path], dict[str, Any]]:
    def given(pair: Pair, folder: Path) -> dict[str, Any]:
        fused = features_of(pair, PROMPTS)
        if "width" in options:
            fused = [rows[:, : options["width"]] for rows in fused]
        kept = {name: value for name, value in options.items() if name != "width"}
        serve = write_serve_trace(folder, PROMPTS, {}, fused=None if kept.pop("bare", False) else fused, **kept)
        return {"prompts": None, "replay": serve, "features": "serve", "target": None}

    return given


def _damaged(name: str, *, cut: bool) -> Callable[[Pair, Path], dict[str, Any]]:
    def given(pair: Pair, folder: Path) -> dict[str, Any]:
        shutil.copytree(getattr(pair, name), folder)
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2] if cut else b"\xff" * 16 + whole[16:])
        return {name: folder}

    return given


def _folder(**options: Any) -> Callable[[Pair, Path], dict[str, Any]]:
    def given(_pair: Pair, folder: Path) -> dict[str, Any]:
        ids = options.get("prompts", PROMPTS)
        return {"features": str(write_training_data(folder, ids, layers=options.get("layers", 3)))}

    return given


FAULTS: dict[str, tuple[Callable[[Pair, Path], dict[str, Any]], type[EagleTraceError], str]] = {
    "no draft": (lambda _p, f: {"draft": f}, CheckpointError, "there is no folder"),
    "no target": (lambda _p, f: {"target": f}, CheckpointError, "no such folder"),
    "flat format": (_flat, CheckpointError, "SGLang's flat format"),
    "a target as draft": (lambda p, _f: {"draft": p.target}, CheckpointError, "no speculators draft"),
    "another speculator": (_changed(speculators_model_type="dflash"), CheckpointError, "is a dflash draft"),
    "two norms": (_changed(norm_before_fc=True, fc_norm=True), CheckpointError, "mutually exclusive"),
    "wrong sizes": (_changed(draft_vocab_size=41), CheckpointError, "40 entries for a draft vocabulary of 41"),
    "no number for an eps": (_layer(rms_norm_eps="small"), CheckpointError, "rms_norm_eps in .* is 'small'"),
    "a negative eps": (_layer(rms_norm_eps=-0.5), CheckpointError, "rms_norm_eps in .* is -0.5, not a number of 0 or"),
    "a theta of 0": (
        _layer(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        CheckpointError,
        "rope_parameters.rope_theta in .* is 0.0, not a number above 0",
    ),
    "yarn without a factor": (
        _layer(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        CheckpointError,
        "rope_parameters of the form yarn has no factor",
    ),
    "a projection of another size": (
        _tensor("fc.weight", lambda one: one[:-1]),
        CheckpointError,
        r"fc.weight in .* is \[31, 96\], its config makes \[32, 96\]",
    ),
    "a rotation that nobody knows": (
        _layer(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        CheckpointError,
        "speculators cannot load .*: it knows no 'spiral'",
    ),
    "no heads": (_layer(num_attention_heads=0), CheckpointError, "num_attention_heads in .* is 0, not a whole number"),
    "a null where the trainer wants a number": (_layer(rms_norm_eps=None), CheckpointError, "refuses the config"),
    "ids that are fractions": (
        _d2t(lambda one: one.float()),
        CheckpointError,
        r"d2t in .* is stored as float32 \[",
    ),
    "ids beyond the target's": (_d2t(lambda one: one + 10**6), CheckpointError, "makes 0 of 40 target ids in range"),
    "no map of the vocabulary": (
        lambda p, f: {"draft": lose(p, f, "d2t").draft},
        CheckpointError,
        "there is no d2t in .*, but the draft has 40 ids",
    ),
    "quantised weights": (_tensor("fc.weight", lambda one: one.to(torch.int8)), CheckpointError, "quantised tensors"),
    "weights wider than any that is served": (
        _tensor("fc.weight", lambda one: one.double()),
        CheckpointError,
        "stored in float64, .* say with --dtype",
    ),
    "layers the target lacks": (
        _changed(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        CheckpointError,
        "does not fit the target",
    ),
    "another hidden size": (
        lambda _p, f: {"target": write_target(f, hidden=64)},
        CheckpointError,
        "hidden size 32, .* has 64",
    ),
    "no embedding": (
        lambda p, f: {
            "draft": lose(p, f, "embed_tokens.weight").draft,
            "target": None,
            **_folder()(p, f / "hs"),
        },
        CheckpointError,
        "has no embed_tokens.weight",
    ),
    "single-layer features": (_replayed(width=HIDDEN), CheckpointError, "width 32, this draft's fc takes 96"),
    "no fused values": (_replayed(level="stats"), UsageError, "keeps no values"),
    "no fused rows": (_replayed(bare=True), UsageError, "keeps no values"),
    "positions from a prefix cache": (
        _replayed(without_roots=[(0, 0), (0, 1)]),
        UsageError,
        "key-0 at position 0",
    ),
    "no stored features": (lambda _p, f: {"features": str(f)}, UsageError, "no hs_N.safetensors"),
    "stored for other prompts": (
        _folder(prompts=random_prompts([9, 5], seed=8)),
        CheckpointError,
        "prompt p0",
    ),
    "stored for another draft": (_folder(layers=2), CheckpointError, "made for another draft"),
    "neither prompts nor replay": (lambda _p, _f: {"prompts": None}, UsageError, "one of --prompts"),
    "serve without replay": (lambda _p, _f: {"features": "serve"}, UsageError, "--replay"),
    "compute without target": (lambda _p, _f: {"target": None}, UsageError, "give --target"),
    "a draft cut off": (_damaged("draft", cut=True), CheckpointError, "is damaged .* save the checkpoint again"),
    "a draft altered": (_damaged("draft", cut=False), CheckpointError, "is damaged .* save the checkpoint again"),
    "a target cut off": (_damaged("target", cut=True), CheckpointError, "cannot load the target"),
    "a target altered": (_damaged("target", cut=False), CheckpointError, "cannot load the target"),
    "no architectures": (
        lambda p, f: {"draft": _with_config(p, f, {"architectures": None, "model_type": "llama"})},
        CheckpointError,
        "no speculators draft",
    ),
    "no device of that name": (lambda _p, _f: {"device": "tpu"}, UsageError, "--device must be auto, cpu or cuda"),
    "no steps": (lambda _p, _f: {"steps": 0}, UsageError, "1 or more"),
    "unknown dtype": (lambda _p, _f: {"dtype": "int8"}, UsageError, "--dtype"),
    "unknown level": (lambda _p, _f: {"level": "all"}, UsageError, "level must be one of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said_in_one_sentence_and_leaves_nothing_behind(
    fault: str, pair: Pair, tmp_path: Path, prompts: Path
) -> None:
    options, error, message = FAULTS[fault]
    with pytest.raises(error, match=message) as raised:
        run(pair, tmp_path / "trace", **{"prompts": prompts} | options(pair, tmp_path / "fault"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_an_error_before_anything_is_loaded(
    pair: Pair, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HOST, "table", lambda: pytest.fail("the trainer was asked for"))
    with pytest.raises(HostError, match="no CUDA device"):
        run(pair, tmp_path / "trace", prompts=prompts, device="cuda")


def test_a_taken_folder_is_refused_before_any_work(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    out = run(pair, tmp_path / "trace", prompts=prompts).path
    with pytest.raises(OutputExistsError):
        run(pair, out, prompts=prompts, target=tmp_path / "missing")
    with pytest.raises(CheckpointError):
        run(pair, out, prompts=prompts, target=tmp_path / "missing", force=True)
    assert open_trace(out).sealed, "what is there goes only when all is ready"
    assert run(pair, out, prompts=prompts, force=True).sealed


def test_a_train_trace_cannot_be_replayed(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    out = run(pair, tmp_path / "trace", prompts=prompts).path
    with pytest.raises(UsageError, match="is a train trace"):
        run(pair, tmp_path / "again", replay=out)
    with pytest.raises(UsageError, match="choose another"):
        run(pair, out, replay=out, force=True)


def test_a_selection_keeps_all_shapes_and_only_the_rows_it_names(pair: Pair, tmp_path: Path, prompts: Path) -> None:
    whole = run(pair, tmp_path / "whole", prompts=prompts)
    chosen = Selection.parse(sites="fc.*,logits", roots="1:3", steps="0:2", prompts="0,2")
    part = run(pair, tmp_path / "part", prompts=prompts, selection=chosen)
    assert part.sites == ["fc.in", "fc.out", "logits"]
    assert part.shapes == whole.shapes
    kept = {(p, r, s) for p in (0, 2) for r in (1, 2) for s in (0, 1)}
    rows = part.rows
    found = set(zip(rows.prompt_id.tolist(), rows.root.tolist(), rows.step.tolist(), strict=True))
    assert (found, len(rows)) == (kept, len(kept))
    wanted = {(p, r) for p, r, _ in kept}
    for site in ("fc.out", "logits"):
        of_whole = Table(whole).site(site)
        of_part = Table(part).site(site)
        assert len(of_part) == (len(wanted) if site == "fc.out" else len(kept))
        assert all(np.array_equal(values, of_whole[key]) for key, values in of_part.items())
    assert part.table("topk").num_rows == 0, "the best ids are sites that were not chosen"
    assert part.manifest.settings["selection"] == json.loads(json.dumps(chosen.to_dict()))


def test_a_byte_budget_stops_between_forwards(
    pair: Pair, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "row_budget", lambda *_: 1)
    trace = run(pair, tmp_path / "trace", prompts=prompts, max_bytes=60_000)
    assert trace.manifest.stopped == "max-bytes"
    assert set(trace.rows.prompt_id.tolist()) == {0}
