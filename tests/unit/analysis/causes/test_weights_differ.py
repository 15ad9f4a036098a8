"""Weights that are loaded and not the trained ones: named, measured, and of the right kind (the demo pair in numpy)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis.diagnosis.diagnose import Diagnosis, diagnose
from tests.support import planted_faults, planted_weights
from tests.support.plant_edits import put
from tests.support.planted import Planted, run
from tests.support.planted_weights import DOWN, both, change

pytestmark = pytest.mark.slow

CASES = planted_weights.cases()
TWO = planted_weights.two_at_once()
WIDE = planted_weights.wide_heads()


def said(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{one.verdict} {one.cause}: {one.evidence}" for one in diagnosis.causes)


@pytest.mark.parametrize(("case", "words", "gone"), CASES, ids=[case.name for case, _, _ in CASES])
def test_the_kind_of_difference_is_said_and_what_brings_the_weights_back(
    case: Planted, words: str, gone: str | None, tmp_path: Path
) -> None:
    result, train, serve = run(case, tmp_path)
    found = [result.diagnosis]
    if gone is not None:
        shutil.rmtree(tmp_path / "deployed")
        found.append(diagnose(result, train, serve))
    for diagnosis, said_so in zip(found, (words, gone), strict=False):
        assert diagnosis is not None
        assert [one.cause for one in diagnosis.confirmed] == [case.cause], said(diagnosis)
        (cause,) = diagnosis.confirmed
        assert str(said_so) in f"{cause.evidence}; {cause.fix}"
        assert cause.fix
        assert cause.site == case.site
        assert not diagnosis.unexplained
    assert result.first_divergence is not None
    assert result.first_divergence.site == case.site


@pytest.mark.parametrize(("case", "words"), WIDE, ids=[case.name for case, _ in WIDE])
def test_heads_at_other_places_are_found_in_projections_wider_than_a_sample(
    case: Planted, words: str, tmp_path: Path
) -> None:
    result, _, _ = run(case, tmp_path)
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert (cause.cause, cause.site) == ("qkv-order", case.site)
    assert words in cause.evidence
    assert not result.diagnosis.unexplained


@pytest.mark.parametrize(("case", "causes"), TWO, ids=[case.name for case, _ in TWO])
def test_two_faults_at_once_are_both_said_and_nothing_else(case: Planted, causes: list[str], tmp_path: Path) -> None:
    result, _, _ = run(case, tmp_path)
    diagnosis = result.diagnosis
    assert diagnosis is not None
    assert sorted(one.cause for one in diagnosis.confirmed) == causes, said(diagnosis)
    assert not diagnosis.unexplained, diagnosis.unexplained
    assert result.first_divergence is not None
    assert result.first_divergence.site == case.site


def test_what_a_confirmed_cause_makes_better_and_not_right_is_not_explained(tmp_path: Path) -> None:
    """The norm is scaled inside the server: no digest knows of it."""

    def scaled(site: str, values: object) -> object:
        return 1.2 * values if site == "layer.0.hidden_norm" else values  # type: ignore[operator]

    case = Planted(
        "eps-and-scale-inside",
        None,
        None,
        config=put("rms_norm_eps", value=1e-2),
        serve={"eps": 1e-2, "damage": scaled},
    )
    result, _, _ = run(case, tmp_path)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["norm-eps"]
    (left,) = result.diagnosis.unexplained
    assert left.startswith("layer.0.hidden_norm is not computed as trained")


@pytest.mark.parametrize("said_so", [True, False], ids=["in the config", "in the engine"])
def test_another_share_of_the_head_is_one_cause(said_so: bool, tmp_path: Path) -> None:
    (plain,) = (one for one in planted_faults.faults() if one.name == "rope-partial")
    config = put("partial_rotary_factor", value=0.375) if said_so else None
    result, _, _ = run(replace(plain, config=config, serve={"share": 0.375}), tmp_path)
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert (cause.cause, cause.site) == ("rope-layout", "layer.0.attn.q_rope")
    assert f"with {'the deployed ' if said_so else ''}0.375 of each head rotated" in cause.evidence


def test_of_two_causes_that_fit_the_same_steps_one_is_confirmed_and_the_other_said_to_fit(tmp_path: Path) -> None:
    """The deployed output projection holds one shard alone: its digest says so, and an unreduced sum looks the same."""
    case = Planted("half-a-projection", "weights-differ", "layer.0.mlp.out", **both(change(DOWN, lambda x: _halved(x))))
    result, _, _ = run(case, tmp_path)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["weights-differ"]
    (other,) = (one for one in result.diagnosis.causes if one.cause == "tp-shard")
    assert other.verdict == "not_tested"
    assert other.evidence.startswith("equally good here: ")
    assert "weights-differ" in str(other.fix)


def _halved(x: Any) -> Any:
    x = x.copy()
    x[:, x.shape[1] // 2 :] = 0
    return x
