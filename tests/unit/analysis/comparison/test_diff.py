"""What is healthy agrees, and a fault in the numbers is named at the site and step where it was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.capture import Rows
from eagle_trace.errors import IncomparableError
from eagle_trace.manifest import Manifest
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import diff
from tests.support.synthetic import (
    F64,
    Draft,
    Prompt,
    Side,
    default_features,
    make_prompts,
    only,
    value_sites,
    write_trace,
)
from tests.support.verdicts import first, result_of

pytestmark = pytest.mark.slow

CHAINS, TREES = make_prompts(), make_prompts(tree=True)
LATER_SITES = [site for site in value_sites() if not site.startswith(("target", "fused", "fc"))]


@pytest.fixture(scope="module")
def bfloat16_train(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    side = Side("train", dtype="bfloat16", noise_seed=7)
    return write_trace(tmp_path_factory.mktemp("train") / "bfloat16.trace", side, CHAINS)


# ---- healthy pairs
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [CHAINS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("level", ["values", "sketch", "stats", "shapes"])
def test_a_healthy_pair_agrees_at_every_level(prompts: list[Prompt], level: str, write: Any) -> None:
    result = diff(write("train", prompts), write("serve", prompts, level=level, noise_seed=2))
    assert result.verdict == "agree", result.first_divergence
    assert result.exit_status == 0
    assert result.level == level
    assert result.coverage.share == 1.0
    assert result.captures.matched >= result.coverage.matched
    compared = {one.site for one in result.sites if one.verdict == "agree"}
    assert {"token", "position"} <= compared
    assert (set(value_sites()) <= compared) == (level != "shapes")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_is_no_divergence(dtype: str, seed: int, write: Any) -> None:
    prompts = make_prompts(2, tree=bool(seed % 2), seed=seed)
    draft = Draft(seed)
    result = diff(
        write("train", prompts, draft=draft, dtype=dtype, noise_seed=2 * seed),
        write("serve", prompts, draft=draft, dtype=dtype, noise_seed=2 * seed + 1),
    )
    assert result.verdict == "agree", result.first_divergence
    assert "rounding" in [note.name for note in result.benign]


def test_float32_against_bfloat16_is_rounding_of_bfloat16(write: Any) -> None:
    assert diff(write("train"), write("serve", dtype="bfloat16")).verdict == "agree"


def test_sites_that_both_sides_lack_are_fine(write: Any) -> None:
    without = ("layer.0.attn.q_rope", "layer.0.attn.k_rope", "fc.in")
    assert diff(write("train", without=without), write("serve", without=without)).verdict == "agree"


# ---- planted faults
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "level"),
    [(site, "values") for site in value_sites()] + [(site, "stats") for site in value_sites()[::3]],
)
def test_a_fault_is_named_where_it_is_planted_at_step_0(
    site: str, level: str, healthy_train: Trace, write: Any
) -> None:
    fault = only(site, 0, lambda _, values: values * 1.045)
    assert first(diff(healthy_train, write("serve", fault=fault, level=level))) == (site, 0, "values")


@pytest.mark.parametrize(
    ("site", "step"), [(site, 1) for site in LATER_SITES] + [(site, 2) for site in LATER_SITES[::5]]
)
def test_a_fault_is_named_where_it_is_planted_at_later_steps(
    site: str, step: int, healthy_train: Trace, write: Any
) -> None:
    fault = only(site, step, lambda _, values: values[:, ::-1].copy())
    result = diff(healthy_train, write("serve", fault=fault, noise_seed=5))
    assert first(result) == (site, step, "values")
    assert [(one.site, one.step) for one in result.frontier] == [(site, step)]


def test_a_carry_that_is_wrong_at_step_0_is_named_although_step_0_is_fine(healthy_train: Trace, write: Any) -> None:
    def normed(site: str, step: int, rows: Rows, values: F64) -> F64:
        return values / np.sqrt((values**2).mean(axis=1, keepdims=True)) if site == "carry" else values

    result = diff(healthy_train, write("serve", fault=normed))
    assert first(result) == ("carry", 0, "values")
    assert {one.site for one in result.sites if one.step == 0 and one.verdict == "diverged"} == {"carry"}
    assert result_of(result, "hidden", 1).verdict == "diverged"
    assert not result_of(result, "hidden", 1).frontier


@pytest.mark.parametrize("site", value_sites()[::2])
def test_a_single_wrong_row_is_caught(site: str, healthy_train: Trace, write: Any) -> None:
    def one_row(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[(rows.prompt_id == 1) & (rows.root == 9)] *= 1 - 1e-3 * np.arange(values.shape[1]) / values.shape[1]
        return values

    result = diff(healthy_train, write("serve", fault=only(site, 0, one_row)))
    assert first(result) == (site, 0, "values")
    found = result.first_divergence
    assert found is not None
    assert (found.root, found.prompt_key) == (9, "prompt-1")


def test_channels_behind_a_huge_one_are_caught(write: Any) -> None:
    def huge(prompt: Prompt) -> F64:
        features = default_features(prompt)
        features[:, 3] = 1e5
        return features

    def garbage(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[:, 4:] = np.random.default_rng(0).standard_normal(values[:, 4:].shape)
        return values

    folder = write("serve").path.parent
    train = write_trace(folder / "huge-train", Side("train", dtype="bfloat16"), CHAINS, features=huge)
    side = Side("serve", dtype="bfloat16", fault=only("target.hidden.0", 0, garbage))
    result = diff(train, write_trace(folder / "huge-serve", side, CHAINS, features=huge))
    assert first(result) == ("target.hidden.0", 0, "values")
    found = result.first_divergence
    assert found is not None
    assert found.statistic == "channel_median"


@pytest.mark.parametrize("side", ["train", "serve"])
def test_a_nan_is_named_with_its_count(side: str, write: Any) -> None:
    def nan(rows: Rows, values: F64) -> F64:
        values = values.copy()
        values[2, 5] = np.nan
        return values

    made = {
        one: write(one, fault=only("layer.0.mlp.up", 0, nan) if one == side else None) for one in ("train", "serve")
    }
    result = diff(made["train"], made["serve"])
    assert first(result) == ("layer.0.mlp.up", 0, "nonfinite")
    found = result.first_divergence
    assert found is not None
    assert {"train": found.train, "serve": found.serve}[side]["nonfinite"] == 1
    assert found.root == 2


@pytest.mark.parametrize("site", value_sites()[::3])
def test_a_scale_error_of_4_5_percent_is_caught_in_bfloat16_too(site: str, bfloat16_train: Trace, write: Any) -> None:
    fault = only(site, 0, lambda _, values: values * 1.045)
    assert first(diff(bfloat16_train, write("serve", dtype="bfloat16", noise_seed=8, fault=fault))) == (
        site,
        0,
        "values",
    )


def test_two_independent_faults_are_both_listed(healthy_train: Trace, write: Any) -> None:
    def fault(site: str, step: int, rows: Rows, values: F64) -> F64:
        return values * 1.1 if site in ("embed", "fc.out") and step == 0 else values

    result = diff(healthy_train, write("serve", fault=fault))
    assert [(one.site, one.step) for one in result.frontier] == [("fc.out", 0), ("embed", 0)]


def test_agreement_of_which_no_number_speaks_is_none(tmp_path: Path) -> None:
    """Two recordings that kept other sites: their shapes agree, and that is no answer."""
    made = []
    for side, site in (("train", "fc.out"), ("serve", "norm")):
        out = tmp_path / side
        prepare_output(out)
        writer = TraceWriter(out, Manifest(side, "values", "test", dtype="float32"))  # type: ignore[arg-type]
        prompt = {"prompt_id": 0, "prompt_key": "one", "token_ids": [1, 2], "num_prompt_tokens": 2}
        writer.put_record("prompts", prompt)
        rows = Rows.build(prompt_id=[0], root=[0], step=[0], token_id=[2], position=[0], call_id=0)
        writer.put_rows(rows)
        writer.put_values(site, rows, np.ones((1, 8), np.float32))
        shapes = [{"site": name, "shape": [1, 8], "dtype": "float32"} for name in ("fc.out", "norm")]
        call = {"call_id": 0, "role": "draft", "mode": "x", "batch_size": 1, "tokens": 1, "shapes": shapes}
        writer.put_record("calls", call)
        made.append(open_trace(writer.seal()))
    result = diff(*made)
    assert result.exit_status == 2
    assert "no values were compared" in str(result.incomparable)


def test_drafts_of_two_families_are_not_compared(tmp_path: Path) -> None:
    made = []
    for family in ("eagle3", "eagle3-mla"):
        out = tmp_path / family
        prepare_output(out)
        writer = TraceWriter(out, Manifest("serve", "values", "test", draft={"family": family}))
        made.append(open_trace(writer.seal()))
    assert [trace.family.name for trace in made] == ["eagle3", "eagle3-mla"]
    with pytest.raises(IncomparableError, match=r"eagle3 is of .* family eagle3, .* of the family eagle3-mla: they"):
        diff(*made)


def test_two_dtypes_are_said_to_be_two(tmp_path: Path) -> None:
    prompts = make_prompts(2)
    traces = [
        write_trace(tmp_path / side, Side(side, dtype=dtype, noise_seed=seed), prompts)
        for seed, (side, dtype) in enumerate((("train", "float32"), ("serve", "bfloat16")), start=1)
    ]
    notes = {note.name: note.text for note in diff(*traces).notes}
    assert notes["dtypes"].startswith("training computes in float32, serving in bfloat16")
    assert "dtypes" not in {note.name for note in diff(traces[0], traces[0]).notes}


def test_a_cache_of_keys_in_another_dtype_is_said_where_the_other_side_has_none(tmp_path: Path) -> None:
    prompts = make_prompts(1)
    train, serve = (write_trace(tmp_path / side, Side(side), prompts) for side in ("train", "serve"))
    for held, said in (("fp8_e4m3", True), (serve.manifest.dtype, False)):
        serve.manifest.settings["kv_cache_dtype"] = held
        notes = {note.name: note.text for note in diff(train, serve).notes}
        assert ("kv-cache" in notes) == said
        assert not said or notes["kv-cache"].startswith("serving keeps keys and values of the target in fp8_e4m3 and")
    serve.manifest.settings["kv_cache_dtype"] = "bfloat16"
    assert "kv-cache" not in {note.name for note in diff(serve, serve).notes}, "both sides round alike"
