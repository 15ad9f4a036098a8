"""SpecForge's own training forward beside the real SGLang and speculators, on the demo pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnose import diagnosed
from tests.support.pairs import TARGET

pytest.importorskip("specforge", reason="pip install --no-deps specforge")
from tests.support.specforge_drafts import exported, write_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Make = Callable[..., Trace]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The demo draft as SpecForge exports it, by what its config says of norm_output."""
    made: dict[str, Path] = {}

    def make(**flags: Any) -> Path:
        name = str(flags)
        if name not in made:
            made[name] = exported(tmp_path_factory.mktemp("specforge"), **flags)
        return made[name]

    return make


def compared(one: Trace, other: Trace) -> Diff:
    return diagnosed(diff(one, other), one, other)


def expect_healthy(result: Diff) -> None:
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert len(result.sites) >= 81
    assert result.coverage.share == 1.0
    assert result.coverage.matched > 100
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()


@pytest.mark.parametrize("features", ["compute", "serve"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_the_real_server_at_every_site_and_step(
    dtype: str, features: str, own: Callable[..., Path], serve: Make, train: Make
) -> None:
    served = serve(dtype=dtype)
    trained = train("specforge", draft=own(), target=TARGET, replay=served.path, features=features)
    assert trained.manifest.host == "specforge"
    assert trained.manifest.dtype == dtype
    expect_healthy(compared(trained, served))


def test_a_tree_is_replayed_but_for_rows_that_see_another_branch(
    own: Callable[..., Path], serve: Make, train: Make
) -> None:
    served = serve(topk=4, draft_tokens=8)
    expect_healthy(compared(train("specforge", draft=own(), replay=served.path), served))


def test_two_trainers_compute_the_same_forward(own: Callable[..., Path], serve: Make, train: Make) -> None:
    served = serve()
    one = train(replay=served.path)
    other = train("specforge", draft=own(), replay=served.path)
    assert [len(one.rows), len(other.rows)] == [len(served.rows)] * 2
    expect_healthy(compared(one, other))
    expect_healthy(compared(other, one))


def test_samples_of_its_own_training_are_features(
    own: Callable[..., Path], serve: Make, train: Make, tmp_path: Path
) -> None:
    served = serve()
    prompts = [row["token_ids"] for row in served.table("prompts").to_pylist()]
    folder = write_samples(tmp_path / "samples", prompts)
    trained = train("specforge", draft=own(), replay=served.path, features=str(folder))
    expect_healthy(compared(trained, served))


# ---- published heads: the format that servers load


def test_a_head_published_under_other_names_is_translated_and_says_so(deployed: Path, serve: Make, train: Make) -> None:
    served = serve()
    trained = train("specforge", draft=deployed, replay=served.path)
    said = trained.manifest.draft["translated"]
    assert any("layers.0.self_attn.q_proj.weight: midlayer" in one or "layers.0." in one for one in said), said
    assert any(one.startswith("norm_output false, as servers mean it") for one in said), said
    expect_healthy(compared(trained, served))


# ---- what norm_output means in 0.2.0


def test_the_manifest_says_what_the_release_computes(own: Callable[..., Path], serve: Make, train: Make) -> None:
    served = serve()
    plain = train("specforge", draft=own(), replay=served.path).manifest.draft
    assert (plain["norm_output"], plain["head_norm"]) == (False, True)
    assert plain["as_written"] == {"norm_output": None, "head_norm": None}
    off = train("specforge", draft=own(norm_output=False), replay=served.path).manifest.draft
    assert (off["norm_output"], off["head_norm"]) == (False, False)
    assert off["as_written"]["norm_output"] is False


def test_a_carry_that_servers_norm_parts_at_the_carry_of_the_first_step(
    own: Callable[..., Path], serve: Make, train: Make
) -> None:
    draft = own(norm_output=True)
    served = serve(draft=draft)
    trained = train("specforge", draft=draft, replay=served.path)
    result = compared(trained, served)
    assert result.verdict == "diverge"
    assert result.first_divergence is not None
    assert (result.first_divergence.site, result.first_divergence.step) == ("carry", 0)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["carry-norm"]
