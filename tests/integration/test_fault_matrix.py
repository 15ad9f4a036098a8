"""Every fault is found where it starts, by its cause, and by no other: real SGLang, real speculators, the demo pair.

Three kinds: a fault inside the engine (one server for all, `tests.support.engine_faults`), a fault of what is deployed
(a server each), and a fault of the training side (no server at all). About 20 minutes on two free cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_trace import Trace, open_trace
from eagle_trace.prompts import read_prompts
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support import engine_faults, faults
from tests.support.pairs import DRAFT, TARGET
from tests.support.relevel import expect_the_same_at_sketch
from tests.support.tables import edit_manifest
from tests.support.verdicts import expect
from tests.support.warm.start import Warm

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Make = Callable[..., Trace]
Edit = Callable[[Any], object]
ROOT = Path(__file__).parents[2]
#: tokens of a chunk of a prefill, fewer than a prompt has
CHUNK = 32


def looked_at(train: Trace, serve: Trace) -> Diff:
    """The diagnosed diff; a diff of the two traces at level ``sketch`` finds the same first divergence."""
    result = diff(train, serve)
    expect_the_same_at_sketch(result, train, serve, train.path.parent)
    return diagnosed(result, train, serve)


# ---- inside the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, folder: Path, deployed: Path, four_prompts: Path, warm: Warm
) -> Iterator[Callable[[str], Trace]]:
    """Records the one server, with a fault committed inside it; the same fault gives the same trace again.

    Its parameter, if there is one, are options of the server. Prompts come in chunks.
    """
    from eagle_trace_serving.host import ServerOptions
    from eagle_trace_serving.requests import Request
    from eagle_trace_serving.server import Server

    file = folder / "fault-of-the-moment"
    file.write_text("")
    paths = [str(ROOT / "tests/support/engine_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    made: dict[str, Trace] = {}
    asked = Request(read_prompts(four_prompts), 24, 4)
    options: dict[str, Any] = getattr(request, "param", {})
    chunks = ("--chunked-prefill-size", str(CHUNK))
    server_options = ServerOptions(TARGET, deployed, dtype="float32", device="cpu", host_args=chunks, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engine_faults.FILE, str(file))
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        with warm(), Server(server_options) as server:

            def record(fault: str) -> Trace:
                if fault not in made:
                    out = folder / f"engine{options.get('topk', '')}-{fault or 'healthy'}.trace"
                    out.mkdir()
                    file.write_text(fault)
                    try:
                        server.record(asked, out)
                    finally:
                        file.write_text("")
                    made[fault] = open_trace(out)
                return made[fault]

            yield record


IN_THE_ENGINE = {
    "eps": ("norm-eps", "layer.0.embed_norm"),
    "offset": ("norm-offset", "layer.0.embed_norm"),
    "theta": ("rope-theta", "layer.0.attn.q_rope"),
    "interleaved": ("rope-layout", "layer.0.attn.q_rope"),
    "qkv-heads": ("qkv-order", "layer.0.attn.q"),
    "two-heads": ("qkv-order", "layer.0.attn.q"),
    "attention-not-reduced": ("tp-shard", "layer.0.attn.out"),
    "mlp-not-reduced": ("tp-shard", "layer.0.mlp.out"),
    "carry": ("carry-norm", "carry"),
    "window": ("sliding-window", "layer.0.attn.context"),
    "stale": ("kv-not-refreshed", "layer.0.attn.context"),
    "permuted": ("features-permuted", "target.hidden.0"),
    "zeros": ("features-degenerate", "target.hidden.1"),
    "twice": ("features-degenerate", "target.hidden.1"),
    "nan": ("nonfinite", "layer.0.mlp.out"),
    "positions-prefill": ("positions-wrong", "position"),
    "positions-extend": ("positions-wrong", "position"),
    "positions-extends": ("positions-wrong", "position"),
    "positions-steps": ("positions-wrong", "position"),
    "positions-growing": ("positions-wrong", "position"),
    "chunk-end": ("tokens-fed-wrongly", "token"),
    "bonus-of-another": ("tokens-fed-wrongly", "token"),
    "bonus-before": ("tokens-fed-wrongly", "token"),
    "draft-before": ("tokens-fed-wrongly", "token"),
    "draft-unmapped": ("tokens-fed-wrongly", "token"),
    "features-late": ("input-shift", "target.hidden.0"),
    "features-of-another": ("features-degenerate", "target.hidden.0"),
    "carry-of-another": ("carry-of-another-row", "hidden"),
    "carry-stale": ("carry-of-another-row", "hidden"),
    "slot-shared": ("kv-slot-of-another-step", "layer.0.attn.context"),
}
#: of these the draft's rows that a tree has too
IN_A_TREE = ("positions-extend", "positions-growing", "bonus-of-another", "features-of-another", "carry-of-another")


def test_the_patched_engine_without_a_fault_is_healthy(engine: Callable[[str], Trace], train: Make) -> None:
    served = engine("")
    expect(looked_at(train(replay=served.path), served), None, None)


@pytest.mark.parametrize("fault", IN_THE_ENGINE)
def test_a_fault_inside_the_engine(fault: str, engine: Callable[[str], Trace], train: Make) -> None:
    served = engine(fault)
    expect(looked_at(train(replay=served.path), served), *IN_THE_ENGINE[fault])


@pytest.mark.parametrize("fault", IN_THE_ENGINE)
def test_a_fault_inside_the_engine_is_the_same_one_between_two_servers(
    fault: str, engine: Callable[[str], Trace]
) -> None:
    healthy, served = engine(""), engine(fault)
    expect(diagnosed(diff(healthy, served), healthy, served), *IN_THE_ENGINE[fault])


def test_a_constant_shift_of_all_positions_is_benign(engine: Callable[[str], Trace], train: Make) -> None:
    served = engine("positions-everywhere")
    result = looked_at(train(replay=served.path), served)
    expect(result, None, None)
    assert [note.name for note in result.benign if note.name == "position-offset"]


def test_a_key_that_is_nowhere_in_the_trace_is_named_by_its_site(engine: Callable[[str], Trace], train: Make) -> None:
    """The slot of a draft step still holds what was there before, which no trace says: no cause can be proved."""
    served = engine("slot-of-first")
    result = looked_at(train(replay=served.path), served)
    assert result.diagnosis is not None
    first = result.first_divergence
    assert (first.site, first.step) == ("layer.0.attn.context", 2)
    assert not result.diagnosis.confirmed
    assert result.diagnosis.unexplained


@pytest.mark.parametrize("engine", [{"topk": 4, "draft_tokens": 8}], indirect=True, ids=["tree"])
@pytest.mark.parametrize("fault", ["", *IN_A_TREE])
def test_a_fault_inside_an_engine_that_drafts_trees(fault: str, engine: Callable[[str], Trace], train: Make) -> None:
    served = engine(fault)
    result = looked_at(train(replay=served.path), served)
    expect(result, *IN_THE_ENGINE.get(fault, (None, None)))
    accept = result.accept_length
    assert accept.branches > 1
    assert accept.comparable == (accept.predicted_range is not None), "a chain's is not held against a tree's"
    if not fault:
        low, high = accept.predicted_range
        assert 0.97 * low <= accept.observed <= 1.03 * high


# ---- what is deployed ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deployed:
    """A deployed folder with something wrong in it, or a wrong option."""

    cause: str
    site: str
    config: Edit | None = None
    tensors: Edit | None = None
    trained: Edit | None = None
    options: dict[str, Any] = field(default_factory=dict)
    features: str = "compute"


def _ids(*ids: int) -> Edit:
    return lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(ids))


def _offsets(change: Callable[[Any, Any], Any]) -> Edit:
    return lambda held: held.update(d2t=change(held["d2t"], torch.arange(len(held["d2t"]))))


def _without(*names: str) -> Edit:
    return lambda held: [held.pop(name) for name in names]


def _rename(old: str, new: str) -> Edit:
    return lambda held: held.update({new: held.pop(old)})


def _set(**entries: Any) -> Edit:
    return lambda config: config.update(entries)


HIDDEN_NORM, Q = "layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"
AS_DEPLOYED = {
    "single-layer": Deployed("single-layer-features", "fused", config=faults.single_layer_features),
    "algorithm-eagle": Deployed(
        "single-layer-features", "fused", options={"host_args": ("--speculative-algorithm", "EAGLE")}
    ),
    "layer-ids-shifted": Deployed("layer-ids-shifted", "target.hidden.0", config=faults.layer_ids_shifted),
    "layer-ids-default": Deployed(
        "layer-ids-default",
        "target.hidden.0",
        config=lambda config: config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids"),
        trained=_set(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
    ),
    # SGLang captures layers as it reaches them: a list in another order is fed in ascending order all the same
    "ids-unsorted": Deployed(
        "features-permuted",
        "target.hidden.0",
        config=_ids(3, 1, 4),
        trained=_set(eagle_aux_hidden_state_layer_ids=[4, 2, 5]),
    ),
    "norm-renamed": Deployed(
        "weights-dropped", "layer.0.hidden_norm", tensors=_rename(HIDDEN_NORM, "decoder.hidden_norm.weight")
    ),
    "q-renamed": Deployed(
        "weights-dropped", "layer.0.attn.q", tensors=_rename(Q, "decoder.self_attn.q_projection.weight")
    ),
    "head-missing": Deployed("weights-missing", "logits", tensors=faults.lm_head_missing),
    "head-tied": Deployed("lm-head-tied", "logits", config=_set(tie_word_embeddings=True)),
    "head-from-target": Deployed(
        "lm-head-from-target", "logits", config=_set(draft_vocab_size=None), tensors=_without("d2t", "lm_head.weight")
    ),
    "d2t-ids": Deployed("d2t-absolute", "topk.target_id", tensors=_offsets(lambda d, n: d + n)),
    "d2t-minus-arange": Deployed("d2t-absolute", "topk.target_id", tensors=faults.d2t_minus_arange),
    "d2t-zeros": Deployed("d2t-missing", "topk.target_id", tensors=_offsets(lambda d, _: 0 * d)),
    "d2t-other": Deployed("d2t-stale", "topk.target_id", tensors=_offsets(lambda d, _: d + 1)),
    "eps-in-config": Deployed("norm-eps", "layer.0.embed_norm", config=faults.norm_eps),
    "theta-in-config": Deployed("rope-theta", "layer.0.attn.q_rope", config=faults.rope_theta),
    "partial-rotary": Deployed("rope-layout", "layer.0.attn.q_rope", config=faults.partial_rotary),
    "another-epoch": Deployed("weights-differ", "fc.out", tensors=faults.another_epoch),
    "int8-draft": Deployed("weights-differ", "layer.0.attn.q", tensors=faults.int8),
    "gate-and-up": Deployed("weights-differ", "layer.0.mlp.gate", tensors=faults.gate_and_up_exchanged),
    "fc-blocks": Deployed("weights-differ", "fc.out", tensors=faults.fc_blocks_moved),
    # within tolerance end to end: what is proved of the step alone
    "down-scaled-bf16": Deployed(
        "weights-differ", "layer.0.mlp.out", tensors=faults.down_scaled, options={"dtype": "bfloat16"}
    ),
    "one-output-scaled-bf16": Deployed(
        "weights-differ", "layer.0.attn.out", tensors=faults.one_output_scaled, options={"dtype": "bfloat16"}
    ),
    "int8-draft-bf16": Deployed("weights-differ", "layer.0.attn.q", tensors=faults.int8, options={"dtype": "bfloat16"}),
    "window-flag": Deployed(
        "sliding-window",
        "layer.0.attn.context",
        options={"host_args": ("--speculative-draft-window-size", "24")},
    ),
}


@pytest.mark.parametrize("name", AS_DEPLOYED)
def test_a_fault_of_what_is_deployed(
    name: str, serve: Make, train: Make, deployed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AS_DEPLOYED[name]
    monkeypatch.setenv(*faults.FRESH_MEMORY)
    broken = faults.edit(deployed, folder / f"matrix-{name}", config=case.config, tensors=case.tensors)
    served = serve(draft=broken, **case.options)
    trained = DRAFT if case.trained is None else faults.edit(DRAFT, folder / f"trained-{name}", config=case.trained)
    expect(looked_at(train(replay=served.path, draft=trained), served), case.cause, case.site)


@pytest.mark.parametrize(
    ("features", "site"), [("compute", "target.hidden.0"), ("serve", "layer.0.attn.context")], ids=["target", "draft"]
)
def test_a_cache_that_rounds_its_keys(features: str, site: str, serve: Make, train: Make) -> None:
    served = serve(host_args=("--kv-cache-dtype", "bfloat16"))
    result = looked_at(train(replay=served.path, features=features), served)
    expect(result, "kv-cache-dtype", site)
    assert result.diagnosis is not None
    assert not result.diagnosis.faulty, "every step is as its cache makes it"


def test_two_faults_that_meet_in_one_norm_are_both_said(serve: Make, train: Make, deployed: Path, folder: Path) -> None:
    out = folder / "matrix-eps-and-norm"
    broken = faults.edit(deployed, out, config=faults.norm_eps, tensors=faults.hidden_norm_scaled)
    served = serve(draft=broken)
    result = looked_at(train(replay=served.path), served)
    assert result.first_divergence is not None
    assert result.first_divergence.site == "layer.0.embed_norm"
    assert result.diagnosis is not None
    assert sorted(one.cause for one in result.diagnosis.confirmed) == ["norm-eps", "weights-differ"]
    assert not result.diagnosis.unexplained


def test_another_target(serve: Make, train: Make, folder: Path) -> None:
    def stir(held: dict[str, torch.Tensor]) -> None:
        draw = torch.Generator().manual_seed(1)
        for name, one in held.items():
            if one.ndim == 2 and "embed" not in name:
                held[name] = one * (1 + 0.05 * torch.randn(one.shape, generator=draw)).to(one.dtype)

    other = faults.edit(TARGET, folder / "other-target", tensors=stir)
    served = serve(target=other)
    expect(looked_at(train(replay=served.path), served), "target-differs", "target.hidden.0")


def test_positions_past_the_deployed_limit(engine: Callable[[str], Trace], train: Make, folder: Path) -> None:
    """The engine fault clamps positions; the manifest is made to say the limit that goes with it."""
    served = engine("reach")

    def limit(manifest: dict[str, Any]) -> None:
        manifest["draft"]["config"]["max_position_embeddings"] = engine_faults.LIMIT

    edit_manifest(served.path, limit)
    served = open_trace(served.path)
    expect(looked_at(train(replay=served.path), served), "max-position", "layer.0.attn.q_rope")


# ---- what training did ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A draft or its features, other than what the server has."""

    cause: str
    site: str
    config: Edit | None = None
    tensors: Edit | None = None
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None


def _with(name: str, width: int) -> Edit:
    weight = 1 + 0.3 * torch.randn(width, generator=torch.Generator().manual_seed(2))
    return lambda held: held.update({name: weight.to(held["norm.weight"].dtype)})


def _fc_norms(held: dict[str, torch.Tensor]) -> None:
    for n in range(3):
        _with(f"fc_norm.{n}.weight", 128)(held)


def _own_embedding(held: dict[str, torch.Tensor]) -> None:
    noise = 0.02 * torch.randn(held["embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(3))
    held["embed_tokens.weight"] = held["embed_tokens.weight"] + noise.to(held["embed_tokens.weight"].dtype)


def _final_norm(x: torch.Tensor) -> torch.Tensor:
    weight = load_file(TARGET / "model.safetensors")["model.norm.weight"].float()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _layer_swapped(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return x[:, list(order)]


AS_TRAINED = {
    "residual-norm": Trained("residual-norm", "layer.0.attn.residual", config=faults.norm_before_residual),
    "carry-norm": Trained("carry-norm", "carry", config=faults.norm_output),
    "norm-before-fc": Trained(
        "fc-norm-ignored", "fc.in", config=_set(norm_before_fc=True), tensors=_with("input_norm.weight", 384)
    ),
    "fc-norm": Trained("fc-norm-ignored", "fc.in", config=_set(fc_norm=True), tensors=_fc_norms),
    "eps": Trained(
        "norm-eps", "layer.0.embed_norm", config=lambda c: c["transformer_layer_config"].update(rms_norm_eps=1e-2)
    ),
    "embedding": Trained("embedding-replaced", "embed", config=_set(embed_requires_grad=True), tensors=_own_embedding),
    "features-zero": Trained(
        "features-degenerate", "target.hidden.1", stored=lambda x: x * torch.tensor([1.0, 0, 1])[:, None]
    ),
    "features-thrice": Trained("features-degenerate", "target.hidden.1", stored=lambda x: _layer_swapped(x, (0, 0, 0))),
    "features-permuted": Trained("features-permuted", "target.hidden.0", stored=lambda x: _layer_swapped(x, (1, 0, 2))),
    "features-normed": Trained("features-normed", "target.hidden.0", stored=_final_norm),
    "features-late": Trained("input-shift", "target.hidden.0", stored=lambda x: x.roll(1, dims=0)),
}


def stored_features(served: Trace, out: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The features that the server fed, as speculators stores its training data, changed: x [T, 3, G] -> the same."""
    out.mkdir()
    keys, values = served.keys("fused"), served.values("fused")
    for number, ids in zip(served.prompts["prompt_id"], served.prompts["token_ids"], strict=True):
        at = np.flatnonzero((keys.prompt_id == number) & (keys.step == 0))
        at = at[np.argsort(keys.root[at])]
        rows = torch.from_numpy(values[at]).reshape(len(at), 3, -1)
        rows = change(rows)
        # a row for every token, and behind the layers the target's own last state, which is not fed
        rows = torch.cat([rows, rows[-1:].expand(len(ids) - len(rows), -1, -1)])
        hidden = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
        tokens = torch.tensor(np.asarray(ids), dtype=torch.int64)
        save_file({"hidden_states": hidden.contiguous(), "token_ids": tokens}, out / f"hs_{number}.safetensors")
    return out


@pytest.mark.parametrize("name", AS_TRAINED)
def test_a_fault_of_the_training_side(name: str, serve: Make, train: Make, folder: Path) -> None:
    case, served = AS_TRAINED[name], serve()
    draft = DRAFT
    if case.config is not None or case.tensors is not None:
        draft = faults.edit(DRAFT, folder / f"matrix-trained-{name}", config=case.config, tensors=case.tensors)
    options: dict[str, Any] = {}
    if case.stored is not None:
        options["features"] = str(stored_features(served, folder / f"matrix-features-{name}", case.stored))
    expect(looked_at(train(replay=served.path, draft=draft, **options), served), case.cause, case.site)


def test_stored_features_that_are_right_confirm_nothing(serve: Make, train: Make, folder: Path) -> None:
    served = serve()
    features = stored_features(served, folder / "matrix-features-right", lambda x: x)
    expect(looked_at(train(replay=served.path, features=str(features)), served), None, None)


def test_other_tokens_for_the_same_prompt(serve: Make, train: Make, one_prompt_as_ids: Path, folder: Path) -> None:
    line = json.loads(one_prompt_as_ids.read_text())
    with_bos = folder / "matrix-bos.jsonl"
    with_bos.write_text(json.dumps(line | {"input_ids": [256, *line["input_ids"]]}))
    served = serve(prompts=one_prompt_as_ids)
    expect(looked_at(train(prompts=with_bos), served), "tokens-differ", "token")


# ---- healthy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serve_options", "train_options"),
    [
        pytest.param({}, {}, id="fp32"),
        pytest.param({}, {"features": "serve", "target": None}, id="fp32-features-of-the-server"),
        pytest.param({"dtype": "bfloat16"}, {}, id="bf16"),
        pytest.param({"topk": 4, "draft_tokens": 8}, {}, id="fp32-tree"),
        pytest.param({"topk": 4, "draft_tokens": 8, "dtype": "bfloat16"}, {}, id="bf16-tree"),
    ],
)
def test_nothing_is_confirmed_on_a_healthy_pair(
    serve: Make, train: Make, serve_options: Any, train_options: Any
) -> None:
    served = serve(**serve_options)
    result = looked_at(train(replay=served.path, **train_options), served)
    expect(result, None, None)
    if not serve_options:
        assert result.accept_length.predicted == pytest.approx(result.accept_length.observed, abs=0.02)


def test_the_document_names_every_fault() -> None:
    rows = (ROOT / "docs/fault-matrix.md").read_text(encoding="utf-8").splitlines()
    named = {tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows if row.startswith("|")}
    told = {(row[0], row[2], row[3]) for row in named if len(row) == 5}
    for name, (cause, site) in IN_THE_ENGINE.items():
        assert (name, cause, f"`{site}`") in told
    for name, case in [*AS_DEPLOYED.items(), *AS_TRAINED.items()]:
        assert (name, case.cause, f"`{case.site}`") in told
