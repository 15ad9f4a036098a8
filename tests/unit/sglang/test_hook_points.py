"""Hook points of a draft class: each site is taken where it is, and a class that lacks a place loses that site by name.

The draft is a small module tree of the shape of SGLang's, with its fused pairs and its shared rotary module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_trace.capture import Shard
from eagle_trace.errors import HostError
from eagle_trace.families import EAGLE3, EAGLE3_MLA
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.sites import draft_sites
from eagle_trace_serving.facts import tell_missing
from eagle_trace_serving.taps import shards_of
from eagle_trace_sglang.layers import draft_layers, draft_place, family_of
from eagle_trace_sglang.params import loaded_params, used_name
from eagle_trace_sglang.sites import hook_draft, taps

H, A, K, MIDDLE, ROWS = 8, 8, 4, 6, 3
#: what comes with the call, or is worked out from other sites
NOT_OF_A_MODULE = ("token", "position", "fused", "target.hidden.", "topk.")


class Norm(nn.Module):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return 2 * x
        return 2 * (x + residual), x + residual


class Linear(nn.Module):
    """SGLang's parallel linears return (output, bias)."""

    tp_rank, tp_size, reduce_results, num_kv_head_replicas = 0, 1, True, 1

    def __init__(self, enters: int, leaves: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(leaves, enters))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class Rotary(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return -q, -k


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * up


class Attention(nn.Module):
    def __init__(self, enters: int, rotary: Rotary) -> None:
        super().__init__()
        self.q_size, self.kv_size = A, K
        self.qkv_proj, self.rotary_emb, self.o_proj = Linear(enters, A + 2 * K), rotary, Linear(A, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.qkv_proj(x)[0].split([A, K, K], dim=-1)
        q, k = self.rotary_emb(q, k)
        return self.o_proj(q + k.repeat(1, A // K))[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = Linear(H, 2 * MIDDLE), Activation(), Linear(MIDDLE, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, first: bool, rotary: Rotary) -> None:
        super().__init__()
        self.first = first
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = Norm(), Norm(), Norm()
        self.self_attn, self.mlp = Attention(2 * H if first else H, rotary), Mlp()

    def forward(self, positions: Tensor, embeds: Tensor, hidden_states: Tensor, residual: Any) -> Any:
        if self.first:
            residual = hidden_states
            x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden_states)], dim=-1)
        else:
            x, residual = self.hidden_norm(hidden_states, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x), residual)
        return self.mlp(x), residual


class Inner(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        rotary = Rotary()
        self.embed_tokens, self.fc, self.norm = nn.Embedding(5, H), nn.Linear(3 * H, H), Norm()
        self.layers = nn.ModuleList([Layer(n == 0, rotary) for n in range(layers)])

    def forward(self, ids: Tensor, features: Tensor) -> Any:
        embeds, x, residual = self.embed_tokens(ids), self.fc(features), None
        for layer in self.layers:
            x, residual = layer(ids, embeds, x, residual)
        normed, stream = self.norm(x, residual)
        return normed, [stream]


class Logits:
    def __init__(self, values: Tensor) -> None:
        self.next_token_logits = values


class Processor(nn.Module):
    def forward(self, hidden: Tensor) -> Logits:
        return Logits(3 * hidden)


class Draft(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.model, self.logits_processor = Inner(layers), Processor()

    def run(self) -> dict[str, list[Tensor]]:
        """One forward; what the hooks took, by site."""
        taken: dict[str, list[Tensor]] = {}
        with Hooks() as hooks, torch.no_grad():
            hook_draft(hooks, self, lambda site, tensor: taken.setdefault(site, []).append(tensor.clone()))
            ids = torch.arange(ROWS)
            self.logits_processor(self.model(ids, torch.randn(ROWS, 3 * H))[0])
        return taken


def missing_sites(model: Draft) -> dict[str, str]:
    with Hooks() as hooks:
        return hook_draft(hooks, model, lambda _site, _tensor: None)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_site_is_taken_once_where_it_is(layers: int) -> None:
    taken = Draft(layers).run()
    wanted = {s.name for s in draft_sites(3, layers) if not s.name.startswith(NOT_OF_A_MODULE)}
    assert taken.keys() == wanted
    assert {site: len(found) for site, found in taken.items()} == dict.fromkeys(wanted, 1)
    at = {site: found[0] for site, found in taken.items()}
    for n in range(layers):
        assert torch.equal(at[f"layer.{n}.attn.q_rope"], -at[f"layer.{n}.attn.q"])
        assert torch.equal(at[f"layer.{n}.attn.k_rope"], -at[f"layer.{n}.attn.k"])
        assert torch.equal(at[f"layer.{n}.mlp.act"], at[f"layer.{n}.mlp.gate"] * at[f"layer.{n}.mlp.up"])
        assert torch.equal(at[f"layer.{n}.out"], at[f"layer.{n}.attn.residual"] + at[f"layer.{n}.mlp.out"])
    assert torch.equal(at["carry"], at[f"layer.{layers - 1}.out"])


def lose(model: Draft, path: str) -> None:
    """Take what is at `path` out of the tree."""
    owner, _, name = path.rpartition(".")
    delattr(model.get_submodule(owner), name)


LOSSES = {
    "model.fc": ("fc.in", "fc.out"),
    "model.embed_tokens": ("embed",),
    "model.norm": ("norm", "layer.0.out"),
    "model.layers.0.input_layernorm": ("layer.0.embed_norm",),
    "model.layers.0.hidden_norm": ("layer.0.hidden_norm",),
    "model.layers.0.self_attn.qkv_proj": ("layer.0.attn.q", "layer.0.attn.k", "layer.0.attn.v"),
    "model.layers.0.self_attn.kv_size": ("layer.0.attn.q", "layer.0.attn.k", "layer.0.attn.v"),
    "model.layers.0.self_attn.rotary_emb": ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
    "model.layers.0.self_attn.o_proj": ("layer.0.attn.context", "layer.0.attn.out"),
    "model.layers.0.post_attention_layernorm": ("layer.0.mlp.norm", "layer.0.attn.residual"),
    "model.layers.0.mlp.gate_up_proj": ("layer.0.mlp.gate", "layer.0.mlp.up"),
    "model.layers.0.mlp.act_fn": ("layer.0.mlp.act",),
    "model.layers.0.mlp.down_proj": ("layer.0.mlp.out",),
}


@pytest.mark.parametrize("path", LOSSES)
def test_a_place_that_is_not_there_loses_its_sites_and_no_other(path: str) -> None:
    model = Draft()
    lose(model, path)
    assert missing_sites(model) == dict.fromkeys(LOSSES[path], path)
    # what the recorder asks beside: which rank this is, and what part of a site it holds
    assert draft_place(model) == (0, 1)
    held = shards_of(taps(model))
    assert all(held.get(site.name) is None for site in draft_sites(3, 1))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_a_whole_part_that_is_not_there_loses_all_its_sites() -> None:
    model = Draft()
    lose(model, "model.layers.0.mlp")
    assert missing_sites(model) == {
        "layer.0.mlp.gate": "model.layers.0.mlp.gate_up_proj",
        "layer.0.mlp.up": "model.layers.0.mlp.gate_up_proj",
        "layer.0.mlp.act": "model.layers.0.mlp.act_fn",
        "layer.0.mlp.out": "model.layers.0.mlp.down_proj",
    }


def test_the_rest_of_a_forward_is_recorded_without_a_lost_site() -> None:
    whole, without = Draft(), Draft()
    activation = without.model.layers[0].mlp.act_fn
    lose(without, "model.layers.0.mlp.act_fn")
    # what is no module is no place for a hook
    without.model.layers[0].mlp.act_fn = activation.forward
    assert whole.run().keys() - without.run().keys() == {"layer.0.mlp.act"}


def test_lost_sites_are_written_into_the_manifest() -> None:
    model = Draft()
    lose(model, "model.fc")
    manifest = Manifest("serve", "values", "sglang")
    tell_missing(manifest, "SGLang", missing_sites(model))
    assert [(one["site"], one["rows"]) for one in manifest.not_materialised] == [("fc.in", "all"), ("fc.out", "all")]
    (warning,) = manifest.warnings
    assert "no model.fc" in warning
    assert "fc.in, fc.out" in warning


def test_a_whole_draft_leaves_nothing_in_the_manifest() -> None:
    manifest = Manifest("serve", "values", "sglang")
    tell_missing(manifest, "SGLang", missing_sites(Draft()))
    assert (manifest.not_materialised, manifest.warnings) == ([], [])


def test_the_older_name_of_the_one_layer_is_known() -> None:
    model = Draft()
    model.model.midlayer = model.model.layers[0]
    del model.model.layers
    assert [path for path, _ in draft_layers(model)] == ["model.midlayer"]
    assert missing_sites(model) == {}
    del model.model.midlayer.mlp.act_fn
    assert missing_sites(model) == {"layer.0.mlp.act": "model.midlayer.mlp.act_fn"}


@pytest.mark.parametrize("path", ["model", "logits_processor", "model.layers"])
def test_a_class_of_another_kind_is_refused(path: str) -> None:
    model = Draft()
    lose(model, path)
    with pytest.raises(HostError, match=r"SGLang's draft class Draft cannot be recorded.*LlamaForCausalLMEagle3"):
        missing_sites(model)


# ---- latent attention


LATENT, SHARED_KEY, NARROW, HEADS = 4, 2, 6, 2
PLAIN = A // HEADS - SHARED_KEY


class Split(Linear):
    """A linear that is split along its outputs."""

    gather_output = False


class LatentAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_lora_rank, self.kv_lora_rank = NARROW, LATENT
        self.fused_qkv_a_proj_with_mqa = Linear(2 * H, NARROW + LATENT + SHARED_KEY)
        self.q_a_layernorm, self.kv_a_layernorm, self.rotary_emb = Norm(), Norm(), Rotary()
        self.q_b_proj, self.kv_b_proj, self.o_proj = Split(NARROW, A), Split(LATENT, HEADS * PLAIN), Linear(A, H)

    def forward(self, x: Tensor) -> Tensor:
        q_a, kv_a = self.fused_qkv_a_proj_with_mqa(x)[0].split([NARROW, LATENT + SHARED_KEY], dim=-1)
        latent = self.kv_a_layernorm(kv_a[:, :LATENT])
        q = self.q_b_proj(self.q_a_layernorm(q_a))[0].view(-1, HEADS, A // HEADS)
        turned, key = self.rotary_emb(q[..., PLAIN:], kv_a[:, None, LATENT:])
        # in place, as the expanded form does
        q[..., PLAIN:] = turned + key
        return self.o_proj(q.flatten(1) + latent.repeat(1, 2))[0]


def latent_draft() -> Draft:
    model = Draft()
    model.model.layers[0].self_attn = LatentAttention()
    return model


def test_every_site_of_latent_attention_is_taken_once_where_it_is() -> None:
    model = latent_draft()
    taken = model.run()
    wanted = {site.name for site in draft_sites(3, 1, EAGLE3_MLA) if not site.name.startswith(NOT_OF_A_MODULE)}
    assert {site: len(found) for site, found in taken.items()} == dict.fromkeys(wanted, 1)
    at = {site.removeprefix("layer.0.attn."): found[0] for site, found in taken.items()}
    assert at["kv_a"].shape == (ROWS, LATENT + SHARED_KEY)
    assert torch.equal(at["q_a_norm"], 2 * at["q_a"])
    assert torch.equal(at["kv_a_norm"], 2 * at["kv_a"][:, :LATENT])
    assert torch.equal(at["k_rope"], -at["kv_a"][:, LATENT:])
    # the queries before they are overwritten, and head by head
    assert torch.equal(at["q_rope"], -at["q"].view(ROWS, HEADS, -1)[..., PLAIN:].flatten(1))
    assert family_of(model) is EAGLE3_MLA
    assert family_of(Draft()) is EAGLE3


LATENT_LOSSES = {
    "fused_qkv_a_proj_with_mqa": ("q_a", "kv_a"),
    "q_lora_rank": ("q_a", "kv_a"),
    "q_a_layernorm": ("q_a_norm",),
    "kv_a_layernorm": ("kv_a_norm",),
    "q_b_proj": ("q",),
    "rotary_emb": ("q_rope", "k_rope"),
    "o_proj": ("context", "out"),
    "kv_b_proj": (),
}


@pytest.mark.parametrize("part", LATENT_LOSSES)
def test_a_part_of_latent_attention_that_is_not_there_loses_its_sites_and_no_other(part: str) -> None:
    model = latent_draft()
    path = f"model.layers.0.self_attn.{part}"
    lose(model, path)
    assert missing_sites(model) == {f"layer.0.attn.{site}": path for site in LATENT_LOSSES[part]}


def test_what_a_rank_holds_of_latent_attention_is_asked_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = latent_draft()
    for linear in (Split, Linear):
        monkeypatch.setattr(linear, "tp_rank", 1)
        monkeypatch.setattr(linear, "tp_size", 2)
    assert draft_place(model) == (1, 2)
    held = {site.removeprefix("layer.0."): shard for site, shard in shards_of(taps(model)).items() if shard is not None}
    split = ("attn.q", "attn.q_rope", "attn.context", "mlp.gate", "mlp.up", "mlp.act")
    assert held == dict.fromkeys(split, Shard(1, 2))


def test_the_parameters_of_latent_attention_have_their_trained_names() -> None:
    rows = {row["canonical_name"]: row for row in loaded_params(latent_draft(), None, set())}
    attention = {name.split(".")[3]: row for name, row in rows.items() if ".self_attn." in name}
    assert {part: row["shape"] for part, row in attention.items()} == {
        "q_a_proj": [NARROW, 2 * H], "kv_a_proj_with_mqa": [LATENT + SHARED_KEY, 2 * H], "q_b_proj": [A, NARROW],
        "kv_b_proj": [HEADS * PLAIN, LATENT], "o_proj": [H, A],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("held", "trained"),
    [
        ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"),
        ("layers.12.hidden_norm.weight", "layers.12.input_layernorm.weight"),
        ("layers.1.input_layernorm.weight", None),
        ("layers.1.post_attention_layernorm.weight", "layers.1.post_attention_layernorm.weight"),
    ],
)
def test_the_norm_a_later_layer_starts_with_has_speculators_name(held: str, trained: str | None) -> None:
    assert used_name(held) == trained
