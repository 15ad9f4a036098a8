"""A cache that rounds keys and values: told from a fault, proved of the draft, plausible of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.causes.kv_cache_dtype import _expected
from eagle_trace_analysis.comparison.cached import NAMES, Kept
from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, diagnosed
from tests.support.planted import Planted, run

pytestmark = pytest.mark.slow

CONTEXT = "layer.0.attn.context"
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
#: a place behind every prompt that was planted
BEHIND = 32
States = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]


def cached(dtype: type | None, said: str, **more: Any) -> Planted:
    return Planted(
        "cached", None, None, serve={"cached": dtype} | more, serve_write={"settings": {"kv_cache_dtype": said}}
    )


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A training and a server that rounds nothing."""
    _, train, serve = run(cached(None, "float32"), tmp_path_factory.mktemp("exact"))
    return train, serve


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A training and a server whose cache is of eight bits."""
    _, train, serve = run(cached(E4M3, "fp8_e4m3"), tmp_path_factory.mktemp("coarse"))
    return train, serve


def noise(level: float, first: int = 0) -> States:
    """A target whose hidden states are off by a share of their size from a place on."""

    def states(states: NDArray[Any], _: NDArray[Any]) -> NDArray[Any]:
        out = states.copy()
        behind = out[1:, first:]
        behind *= 1 + level * np.random.default_rng(7).standard_normal(behind.shape)
        return out

    return states


def times(factor: float, rows: slice = slice(None)) -> States:
    """A target whose hidden states are too long, or too short."""

    def states(states: NDArray[Any], _: NDArray[Any]) -> NDArray[Any]:
        out = states.copy()
        out[1:, rows] *= factor
        return out

    return states


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A server whose caches are of eight bits, and whose target's features are 2 % off behind the prompts."""
    planted = cached(E4M3, "fp8_e4m3", summand=noise(0.02, BEHIND))
    _, train, serve = run(planted, tmp_path_factory.mktemp("rounded"))
    return train, serve


@pytest.fixture(scope="module")
def unshown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """The same features beside a draft whose cache rounds nothing."""
    _, train, serve = run(cached(None, "fp8_e4m3", summand=noise(0.02, BEHIND)), tmp_path_factory.mktemp("unshown"))
    return train, serve


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A server whose caches are of eight bits, and whose target's features are 2 % off in prefills as well."""
    _, train, serve = run(cached(E4M3, "fp8_e4m3", summand=noise(0.02)), tmp_path_factory.mktemp("everywhere"))
    return train, serve


def looked_at(one: Trace, two: Trace) -> tuple[Diff, CauseVerdict]:
    result = diagnosed(diff(one, two), one, two)
    assert result.diagnosis is not None
    return result, next(each for each in result.diagnosis.causes if each.cause == "kv-cache-dtype")


def confirmed(result: Diff) -> list[str]:
    """The causes confirmed; what they leave unexplained fails."""
    assert result.diagnosis is not None
    assert not result.diagnosis.unexplained
    return [one.cause for one in result.diagnosis.confirmed]


def test_a_cache_of_eight_bits_is_proved_by_attention_over_rounded_keys_and_values(
    coarse: tuple[Trace, Trace],
) -> None:
    result, one = looked_at(*coarse)
    assert (confirmed(result), one.site) == (["kv-cache-dtype"], CONTEXT)
    assert one.evidence.startswith("by option, serving keeps keys and values in fp8_e4m3 and computes in float32")
    assert one.fix is not None
    assert one.fix.startswith("nothing, if the option is meant")


def test_a_cache_of_eight_bits_is_no_faulty_step_in_bfloat16_either(tmp_path: Path) -> None:
    result, _, _ = run(cached(E5M2, "fp8_e5m2"), tmp_path, "bfloat16")
    assert result.diagnosis is not None
    assert not result.diagnosis.faulty, "the step is as its cache makes it"
    assert confirmed(result) == (["kv-cache-dtype"] if result.verdict == "diverged" else [])


def test_a_cache_that_rounds_and_is_not_said_to_is_not_explained(
    coarse: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(coarse[1].manifest.settings, "kv_cache_dtype")
    result, one = looked_at(*coarse)
    why = "the serving side does not say in which dtype it keeps keys and values"
    assert (one.verdict, one.evidence) == ("not_tested", why)
    assert result.diagnosis is not None
    assert result.diagnosis.unexplained


@pytest.mark.parametrize(
    ("said", "verdict", "words"),
    [
        ("auto", "ruled_out", "keys and values are kept in float32 on both sides"),
        ("float32", "ruled_out", "keys and values are kept in float32 on both sides"),
        ("fp8_e4m3", "ruled_out", "shows no such rounding"),
        ("nvfp4", "not_tested", "what nvfp4 makes of a number is not known here"),
    ],
)
def test_a_server_that_rounds_nothing_is_no_case_whatever_it_says(
    said: str, verdict: str, words: str, exact: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exact[1].manifest.settings, "kv_cache_dtype", said)
    result, one = looked_at(*exact)
    assert (result.verdict, confirmed(result), one.verdict) == ("agree", [], verdict)
    assert words in one.evidence


@pytest.mark.parametrize(
    ("cause", "fault"),
    [("sliding-window", {"window": 12}), ("kv-not-refreshed", {"stale": True}), ("softmax-scale", {"scale": 0.1})],
)
def test_a_fault_of_attention_is_found_over_a_cache_that_rounds(
    cause: str, fault: dict[str, Any], tmp_path: Path
) -> None:
    result, _, _ = run(cached(E4M3, "fp8_e4m3", **fault), tmp_path)
    assert cause in confirmed(result)


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_servers_the_one_that_rounds_is_named(
    swapped: bool, exact: tuple[Trace, Trace], coarse: tuple[Trace, Trace]
) -> None:
    pair = (coarse[1], exact[1]) if swapped else (exact[1], coarse[1])
    result, one = looked_at(*pair)
    assert confirmed(result) == ["kv-cache-dtype"]
    assert (one.fix or "").endswith(f"record {'A' if swapped else 'B'} with --kv-cache-dtype auto")


def test_two_servers_that_round_alike_agree(coarse: tuple[Trace, Trace]) -> None:
    result, one = looked_at(coarse[1], coarse[1])
    assert (result.verdict, one.evidence) == ("agree", "keys and values are kept in fp8_e4m3 on both sides")


def left_open(result: Diff) -> bool:
    """Whether nothing is confirmed, and the features are said to be unexplained."""
    assert result.diagnosis is not None
    (left,) = result.diagnosis.unexplained
    return not result.diagnosis.confirmed and left.startswith("target.hidden.0")


def test_features_that_differ_as_the_rounding_that_the_draft_shows_are_plausibly_its_work(
    rounded: tuple[Trace, Trace],
) -> None:
    result, one = looked_at(*rounded)
    assert (confirmed(result), one.site) == (["kv-cache-dtype"], "target.hidden.0")
    assert "plausible, not proved" in one.evidence


def test_features_that_differ_by_more_than_a_finer_cache_rounds_are_not(
    rounded: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rounded[1].manifest.settings, "kv_cache_dtype", "bfloat16")
    result, one = looked_at(*rounded)
    assert one.verdict == "ruled_out"
    assert "that is not all" in one.evidence
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    assert result.diagnosis.unexplained


@pytest.mark.parametrize(
    "fault",
    [noise(0.12), noise(0.12, BEHIND), times(1.3), times(0.7), times(0.6, slice(5, 6))],
    ids=["all-rows", "behind-the-prompts", "too-long", "too-short", "one-row"],
)
def test_a_fault_of_the_target_beside_a_cache_that_rounds_stays_unexplained(fault: States, tmp_path: Path) -> None:
    result, _, _ = run(cached(E4M3, "fp8_e4m3", summand=fault), tmp_path)
    assert left_open(result)


def test_rows_that_read_nothing_cached_and_differ_as_well_rule_it_out(everywhere: tuple[Trace, Trace]) -> None:
    result, one = looked_at(*everywhere)
    assert (left_open(result), one.verdict) == (True, "ruled_out")
    assert "rows that read nothing from the cache differ as well" in one.evidence


def test_of_a_draft_that_does_not_show_the_rounding_nothing_follows_for_its_target(
    unshown: tuple[Trace, Trace],
) -> None:
    result, one = looked_at(*unshown)
    assert (left_open(result), one.verdict) == (True, "not_tested")
    assert "the draft's cache does not show it" in one.evidence
    assert one.fix is not None
    assert one.fix.startswith("record the serving side with --kv-cache-dtype auto")


def test_beside_a_draft_that_cannot_be_judged_the_rows_of_prefills_decide(
    unshown: tuple[Trace, Trace], everywhere: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, serve in (unshown, everywhere):
        monkeypatch.setitem(serve.manifest.settings, "draft_kv_cache_dtype", "float32")
    result, one = looked_at(*unshown)
    assert (confirmed(result), one.site) == (["kv-cache-dtype"], "target.hidden.0")
    assert "the draft's cache cannot be judged beside it" in one.evidence
    result, one = looked_at(*everywhere)
    assert one.verdict == "not_tested"
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    assert result.diagnosis.unexplained


def test_another_target_is_told_first_and_leaves_the_cache_nothing_of_the_features(
    rounded: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = rounded[1].manifest.target
    monkeypatch.setitem(target, "config", dict(target["config"], rms_norm_eps=1e-2))
    result, one = looked_at(*rounded)
    assert confirmed(result)[0] == "target-differs"
    assert one.site != "target.hidden.0"
    assert "that the target's features differ is explained by target-differs" in one.evidence


@pytest.mark.parametrize(("unit", "least", "most"), [(2.0**-4, 0.01, 0.06), (2.0**-8, 1e-3, 4e-3)])
def test_what_is_expected_of_a_cache_is_of_the_size_of_its_rounding(unit: float, least: float, most: float) -> None:
    sizes = [_expected(unit, layers) for layers in (2, 8, 32, 80)]
    assert sizes == sorted(sizes)
    assert least < sizes[0] < sizes[-1] < most
    assert _expected(unit, 0) == 0, "no layer, no attention"


@pytest.mark.parametrize("dtype", sorted({*NAMES.values(), "float8_e5m2fnuz"} - {"float32"}))
def test_a_number_in_a_cache_is_off_by_no_more_than_the_dtypes_unit(dtype: str) -> None:
    kept = Kept(dtype, "float32")
    x = np.random.default_rng(1).uniform(0.25, 8, 1000).astype(np.float32)
    error = np.abs(kept.rounded(x) - x) / x
    assert 0.5 * kept.unit < error.max() <= kept.unit
    assert np.isfinite(kept.rounded(np.array([1e30, -1e30], dtype=np.float32))).all(), "the largest one at most"
