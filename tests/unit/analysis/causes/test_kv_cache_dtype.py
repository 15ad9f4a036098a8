"""A cache that rounds keys and values: told from a fault, proved of the draft, plausible of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.cached import NAMES, Kept
from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, diagnosed
from tests.support.planted import Planted, run

CONTEXT = "layer.0.attn.context"
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
#: places behind every prompt that was planted
BEHIND = 24


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


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A server whose target's features are 10 % off behind the prompts."""

    def states(states: NDArray[Any], _: NDArray[Any]) -> NDArray[Any]:
        out = states.copy()
        behind = out[1:, BEHIND:]
        behind *= 1 + 0.1 * np.random.default_rng(7).standard_normal(behind.shape)
        return out

    _, train, serve = run(cached(None, "float32", summand=states), tmp_path_factory.mktemp("noisy"))
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


def test_features_that_differ_by_no_more_than_the_rounding_may_do_are_plausibly_its_work(
    noisy: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(noisy[1].manifest.settings, "kv_cache_dtype", "fp8_e4m3")
    result, one = looked_at(*noisy)
    assert (confirmed(result), one.site) == (["kv-cache-dtype"], "target.hidden.0")
    assert "plausible, not proved" in one.evidence


def test_features_that_differ_by_more_are_not(noisy: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(noisy[1].manifest.settings, "kv_cache_dtype", "bfloat16")
    result, one = looked_at(*noisy)
    assert one.verdict == "ruled_out"
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
    assert result.diagnosis.unexplained


@pytest.mark.parametrize("dtype", sorted({*NAMES.values(), "float8_e5m2fnuz"} - {"float32"}))
def test_a_number_in_a_cache_is_off_by_no_more_than_the_dtypes_unit(dtype: str) -> None:
    kept = Kept(dtype, "float32")
    x = np.random.default_rng(1).uniform(0.25, 8, 1000).astype(np.float32)
    error = np.abs(kept.rounded(x) - x) / x
    assert 0.5 * kept.unit < error.max() <= kept.unit
    assert np.isfinite(kept.rounded(np.array([1e30, -1e30], dtype=np.float32))).all(), "the largest one at most"
