"""Engines, trainers and families: another one is a table beside the others, and nothing else has to know of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle_trace import families
from eagle_trace.errors import UsageError
from eagle_trace.families import EAGLE3, EAGLE3_MLA, FAMILIES, Family, Site
from eagle_trace.sites import draft_sites, family_of, forward_order, known_site, site_of_parameter, sites_of
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import Finding, Status
from eagle_trace_analysis.engines import ENGINES, SGLANG, Engine, engine_named, engine_of_host, sglang
from eagle_trace_analysis.replay.families import steps_of
from eagle_trace_analysis.trainers import TRAINERS, Trainer, trainer_of
from tests.support import checkpoints as make


def names_of(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_every_name_of_the_interface(name: str) -> None:
    engine = ENGINES[name]
    assert name == engine.NAME
    for wanted in names_of(Engine):
        described, found = inspect.getattr_static(Engine, wanted), getattr(engine, wanted)
        if not isinstance(described, property):
            own = [one for one in inspect.signature(described).parameters if one != "self"]
            assert len(inspect.signature(found).parameters) == len(own), wanted


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_has_every_name_of_the_interface(name: str) -> None:
    assert all(hasattr(TRAINERS[name], wanted) for wanted in names_of(Trainer))
    assert name == TRAINERS[name].NAME


def test_an_engine_that_is_not_known_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="no engine is called 'nonsense': the engines known here are sglang,"):
        engine_named("nonsense")
    assert engine_of_host("sglang") is SGLANG


def another_engine() -> Engine:
    """An engine that counts layers by their inputs, starts the residual either way, and has a class of its own."""

    def captured(config: Any, layers: int | None, _: str | None) -> list[int] | None:
        return config.get("layers_by_input")

    def capturing(inputs: Sequence[int], *_: Any) -> list[int]:
        return list(inputs)

    def flat(training: Any, ids: Sequence[int], dtype: str) -> dict[str, Any]:
        return sglang.flat_config(training, ids, dtype) | {"architectures": ["Other"], "layers_by_input": list(ids)}

    names = {name: getattr(sglang, name) for name in names_of(Engine)}
    return cast(Engine, SimpleNamespace(**names | {
        "NAME": "other", "TITLE": "Other", "ENGINE": "Other 1.0", "ARCHITECTURE": "Other", "OTHER_NAMES": {},
        "ARCHITECTURES": {"Other"},
        "captured_inputs": captured, "ids_that_capture": capturing, "flat_config": flat, "gaps": lambda _: [],
        "layer_ids": lambda config: config.get("layers_by_input"),
    }))  # fmt: skip


def findings(folder: Path, engine: Engine) -> dict[str, Finding]:
    return {one.name: one for one in check(folder, engine=engine).findings}


def test_check_and_export_ask_the_engine_they_are_given(tmp_path: Path) -> None:
    config = make.speculators_config() | {"norm_before_residual": True}
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    ids = config["eagle_aux_hidden_state_layer_ids"]
    theirs, ours = findings(draft, another_engine()), findings(draft, SGLANG)
    assert (ours["residual-norm"].status, theirs["residual-norm"].status) == (Status.FAIL, Status.PASS)
    assert "Other 1.0" in theirs["format"].evidence
    export(draft, tmp_path / "deployed", engine=another_engine())
    deployed = findings(tmp_path / "deployed", another_engine())
    assert deployed["format"].status is Status.PASS
    assert f"inputs of layers {ids}" in theirs["layer-ids"].evidence
    assert findings(tmp_path / "deployed", SGLANG)["format"].status is Status.FAIL


def test_what_the_engine_cannot_compute_is_one_list(tmp_path: Path) -> None:
    config = make.speculators_config() | {"norm_before_residual": True, "embed_requires_grad": True}
    trainer = trainer_of(config)
    assert trainer is not None
    gaps = SGLANG.gaps(trainer.training_of(config))
    assert [gap.setting for gap in gaps] == ["norm_before_residual", "embedding"]
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    found = findings(draft, SGLANG)
    assert [found[name].evidence for name in ("residual-norm", "embedding")] == [gap.why for gap in gaps]
    assert export(draft, tmp_path / "deployed", force=True) == [gap.why for gap in gaps]


def test_a_flat_config_is_no_trainers() -> None:
    assert trainer_of({"architectures": ["LlamaForCausalLMEagle3"]}) is None


# ---- families


def test_a_second_family_needs_a_list_of_its_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Site("layer.0.mixer.state", ("L",), "value", "all", ("token",), meaning="recurrent state", product=True)
    other = Family("recurrent", lambda n, layers: [*EAGLE3.sites(n, layers)[:3], state])
    monkeypatch.setattr("eagle_trace.sites.FAMILIES", (*families.FAMILIES, other))
    assert sites_of(["token", "layer.0.mixer.state"])[-1] is state
    assert sites_of(["token", "layer.0.attn.q"]) == draft_sites(0, 1)
    assert steps_of(other) == {}
    with pytest.raises(ValueError, match="not the name of a site: nonsense"):
        sites_of(["nonsense"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_step_of_a_family_is_a_site_of_it(family: Family) -> None:
    names = {site.name.removeprefix("layer.0.") for site in draft_sites(family=family)}
    assert set(steps_of(family)) <= names


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_site_is_computed_from_sites_before_it(family: Family) -> None:
    sites = draft_sites(3, 2, family)
    names = [site.name for site in sites]
    assert len(set(names)) == len(names)
    for place, site in enumerate(sites):
        assert set(site.inputs) <= set(names[:place]), site.name
        assert set(site.carried) <= set(names), site.name
        assert site.meaning
    read = {name for site in sites for name in (*site.inputs, *site.carried)}
    assert set(names) - read <= {"topk.target_id", "target.hidden.0", "target.hidden.1", "target.hidden.2"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_forward_order_is_that_of_every_family(family: Family) -> None:
    names = [site.name for site in draft_sites(3, 2, family)]
    assert forward_order(reversed(names)) == names


def test_families_differ_in_their_attention_alone() -> None:
    plain, latent = (draft_sites(3, 2, family) for family in (EAGLE3, EAGLE3_MLA))
    apart = {site.name for site in {*plain} ^ {*latent}}
    assert {re.sub(r"^layer\.\d\.", "", name) for name in apart} == {
        "attn.q_a", "attn.kv_a", "attn.q_a_norm", "attn.kv_a_norm", "attn.q", "attn.k", "attn.v", "attn.q_rope",
        "attn.k_rope", "attn.context",
    }  # fmt: skip
    # tables that know a site by its name alone are right for both
    shared = {site.name: site for site in plain}
    for site in latent:
        if site.name in shared:
            assert site.rotated == shared[site.name].rotated
            assert site.kept == shared[site.name].kept


def test_the_family_of_a_trace_is_the_one_it_names_or_the_one_that_has_its_sites() -> None:
    assert family_of(["hidden", "layer.0.attn.kv_a"]) is EAGLE3_MLA
    assert family_of(["hidden", "layer.0.attn.v"]) is EAGLE3
    assert family_of(["hidden", "layer.0.attn.q"]) is EAGLE3
    assert family_of(["hidden", "layer.0.attn.q"], "eagle3-mla") is EAGLE3_MLA
    assert family_of(["hidden", "layer.0.attn.kv_a"], "of a later version") is EAGLE3_MLA


def test_every_parameter_of_latent_attention_shows_at_its_site() -> None:
    parts = {"q_a_proj": "q_a", "kv_a_proj_with_mqa": "kv_a", "q_a_layernorm": "q_a_norm",
             "kv_a_layernorm": "kv_a_norm", "q_b_proj": "q", "kv_b_proj": "context", "o_proj": "out"}  # fmt: skip
    for module, site in parts.items():
        assert site_of_parameter(f"layers.0.self_attn.{module}.weight") == f"layer.0.attn.{site}"


def test_every_parameter_of_a_draft_shows_at_a_site_that_is_there() -> None:
    config = {**make.decoder_config(2), "draft_vocab_size": 64}
    for name in SGLANG.parameters(config):
        site = site_of_parameter(name)
        assert site is not None, name
        assert known_site(site) is not None


def test_forward_order_puts_what_is_no_site_last() -> None:
    assert forward_order(["zebra", "logits", "token", "ant"]) == ["token", "logits", "ant", "zebra"]
