"""A cache that rounds keys and values: told from a fault, proved of the draft, plausible of the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.cached import NAMES, Kept
from eagle_trace_analysis.diagnosis.diagnose import CauseVerdict, diagnosed
from tests.support.planted import Planted, run, serving

CONTEXT = "layer.0.attn.context"
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
#: places behind every prompt that was planted
BEHIND = 24


def cached(dtype: type | None, said: str | None, **more: Any) -> Planted:
    settings = {} if said is None else {"kv_cache_dtype": said}
    return Planted("cached", None, None, serve={"cached": dtype} | more, serve_write={"settings": settings})


def verdict(result: Diff) -> CauseVerdict:
    assert result.diagnosis is not None
    return next(one for one in result.diagnosis.causes if one.cause == "kv-cache-dtype")


def confirmed(result: Diff) -> list[str]:
    assert result.diagnosis is not None
    return [one.cause for one in result.diagnosis.confirmed]


@pytest.mark.parametrize(("dtype", "said"), [(E4M3, "fp8_e4m3"), (E5M2, "float8_e5m2")])
def test_a_cache_of_eight_bits_is_proved_by_attention_over_rounded_keys_and_values(
    dtype: type, said: str, tmp_path: Path
) -> None:
    result, _, _ = run(cached(dtype, said), tmp_path)
    one = verdict(result)
    assert (confirmed(result), one.site) == (["kv-cache-dtype"], CONTEXT)
    assert result.diagnosis is not None
    assert not result.diagnosis.unexplained
    assert one.evidence.startswith(f"by option, serving keeps keys and values in {said} and computes in float32")
    assert one.fix is not None
    assert one.fix.startswith("nothing, if the option is meant")


def test_a_cache_of_eight_bits_is_proved_in_bfloat16_too(tmp_path: Path) -> None:
    result, _, _ = run(cached(E4M3, "fp8"), tmp_path, "bfloat16")
    assert result.diagnosis is not None
    assert not result.diagnosis.faulty, "the step is as its cache makes it"
    assert confirmed(result) == (["kv-cache-dtype"] if result.verdict == "diverged" else [])
    assert "rounded to float8_e4m3fn" in verdict(result).evidence


def test_a_cache_that_is_said_to_round_and_does_not_leaves_attention_as_it_is(tmp_path: Path) -> None:
    result, _, _ = run(cached(None, "fp8_e4m3"), tmp_path)
    assert (result.verdict, confirmed(result), verdict(result).verdict) == ("agree", [], "ruled_out")
    assert "shows no such rounding" in verdict(result).evidence


def test_a_cache_that_rounds_and_is_not_said_to_is_not_explained(tmp_path: Path) -> None:
    result, _, _ = run(cached(E4M3, None), tmp_path)
    assert verdict(result).verdict == "not_tested"
    assert verdict(result).evidence == "the serving side does not say in which dtype it keeps keys and values"
    assert result.diagnosis is not None
    assert result.diagnosis.unexplained


@pytest.mark.parametrize("said", ["auto", "float32"])
def test_a_cache_in_the_dtype_of_the_computing_is_ruled_out(said: str, tmp_path: Path) -> None:
    result, _, _ = run(cached(None, said), tmp_path)
    assert (verdict(result).verdict, verdict(result).evidence) == (
        "ruled_out",
        "keys and values are kept in float32 on both sides",
    )


def test_a_dtype_that_is_not_known_here_is_said_to_be(tmp_path: Path) -> None:
    result, _, _ = run(cached(None, "nvfp4"), tmp_path)
    assert verdict(result).verdict == "not_tested"
    assert "what nvfp4 makes of a number is not known here" in verdict(result).evidence


def test_a_fault_of_attention_is_found_over_a_cache_that_rounds(tmp_path: Path) -> None:
    result, _, _ = run(cached(E4M3, "fp8_e4m3", window=12), tmp_path)
    assert "sliding-window" in confirmed(result)
    assert result.diagnosis is not None
    assert not result.diagnosis.unexplained


def test_two_servers_of_which_either_rounds_are_told_apart_and_two_that_round_alike_agree(tmp_path: Path) -> None:
    made = {}
    for name, dtype, said in (("exact", None, "float32"), ("coarse", E4M3, "fp8_e4m3"), ("again", E4M3, "fp8_e4m3")):
        (tmp_path / name).mkdir()
        made[name] = serving(cached(dtype, said), tmp_path / name)
    for pair in (("exact", "coarse"), ("coarse", "exact")):
        one, two = (made[name] for name in pair)
        result = diagnosed(diff(one, two), one, two)
        assert confirmed(result) == ["kv-cache-dtype"]
        assert result.diagnosis is not None
        assert not result.diagnosis.unexplained
        assert (verdict(result).fix or "").endswith(f"record {'AB'[pair.index('coarse')]} with --kv-cache-dtype auto")
    one, two = made["coarse"], made["again"]
    result = diagnosed(diff(one, two), one, two)
    assert (result.verdict, verdict(result).evidence) == (
        "agree",
        "keys and values are kept in fp8_e4m3 on both sides",
    )


def noisy(size: float) -> Any:
    def states(states: NDArray[Any], _: NDArray[Any]) -> NDArray[Any]:
        out = states.copy()
        behind = out[1:, BEHIND:]
        behind *= 1 + size * np.random.default_rng(7).standard_normal(behind.shape)
        return out

    return states


@pytest.mark.parametrize(("size", "said"), [(0.002, "bfloat16"), (0.05, "fp8_e4m3")])
def test_features_that_differ_by_no_more_than_the_rounding_may_do_are_plausibly_its_work(
    size: float, said: str, tmp_path: Path
) -> None:
    case = replace(cached(None, said), serve={"summand": noisy(size)})
    result, _, _ = run(case, tmp_path)
    assert (confirmed(result), verdict(result).site) == (["kv-cache-dtype"], "target.hidden.0")
    assert "plausible, not proved" in verdict(result).evidence
    assert result.diagnosis is not None
    assert not result.diagnosis.unexplained


@pytest.mark.parametrize(("size", "said"), [(0.2, "bfloat16"), (2.0, "fp8_e4m3")])
def test_features_that_differ_by_more_are_not(size: float, said: str, tmp_path: Path) -> None:
    case = replace(cached(None, said), serve={"summand": noisy(size)})
    result, _, _ = run(case, tmp_path)
    assert verdict(result).verdict == "ruled_out"
    assert confirmed(result) == []
    assert result.diagnosis is not None
    assert result.diagnosis.unexplained


@pytest.mark.parametrize("dtype", sorted({*NAMES.values(), "float8_e5m2fnuz"} - {"float32"}))
def test_a_number_in_a_cache_is_off_by_no_more_than_the_dtypes_unit(dtype: str) -> None:
    kept = Kept(dtype, "float32")
    x = np.random.default_rng(1).uniform(0.25, 8, 1000).astype(np.float32)
    error = np.abs(kept.rounded(x) - x) / x
    assert 0.5 * kept.unit < error.max() <= kept.unit
    assert np.isfinite(kept.rounded(np.array([1e30, -1e30], dtype=np.float32))).all(), "the largest one at most"
