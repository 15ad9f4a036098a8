"""Two servers held against each other: precision, tensor parallelism and trees, with the real SGLang."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eagle_trace import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.report.text import render

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Make = Callable[..., Trace]
OTHERS = {
    "itself": {"level": "values"},
    "bfloat16": {"dtype": "bfloat16"},
    "two-ranks": {"host_args": ("--tp", "2")},
    "a-tree": {"topk": 4, "draft_tokens": 8},
}


def expect_healthy(result: Diff) -> None:
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()
    assert result.coverage.matched > 100
    assert result.coverage.share == 1.0
    embedding = next(one for one in result.diagnosis.causes if one.cause == "embedding-replaced")
    assert embedding.evidence == "no training trace"


@pytest.mark.parametrize("name", OTHERS)
def test_two_healthy_servers_agree_either_way_round(name: str, serve: Make) -> None:
    one, two = serve(), serve(**OTHERS[name])
    for reference, other in ((one, two), (two, one)):
        result = diagnosed(diff(reference, other), reference, other)
        expect_healthy(result)
        assert "training" not in render(result).replace("no training trace", "")
        if name != "bfloat16":
            assert not [note for note in result.notes if note.name == "answers-part"]


def test_a_train_trace_lends_its_floors_to_two_servers(serve: Make, train: Make) -> None:
    one, two = serve(), serve(dtype="bfloat16")
    trained = train(replay=two.path)
    result = diff(one, two, floors=trained)
    assert result.verdict == "agree", result.first_divergence
    assert str(trained.path) in result.tolerance
    sources = [one.tolerance.source for one in result.sites if one.tolerance]
    assert any(source.startswith("measured in bfloat16") for source in sources)


def test_two_trainers_agree_whatever_they_replay(serve: Make, train: Make) -> None:
    served = serve()
    one, two = train(replay=served.path), train(replay=served.path, features="serve")
    result = diagnosed(diff(one, two), one, two)
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()


def test_a_server_that_caches_keys_in_another_dtype_is_told_from_one_that_does_not(serve: Make) -> None:
    one, two = serve(), serve(host_args=("--kv-cache-dtype", "bfloat16"))
    assert (one.manifest.settings["kv_cache_dtype"], two.manifest.settings["kv_cache_dtype"]) == ("float32", "bfloat16")
    result = diagnosed(diff(one, two), one, two)
    assert (result.verdict, result.first_divergence and result.first_divergence.site) == ("diverged", "target.hidden.0")
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert (cause.cause, cause.site) == ("kv-cache-dtype", "target.hidden.0")
    assert "plausible, not proved" in cause.evidence
    assert not result.diagnosis.unexplained
    assert not result.diagnosis.faulty, "every step is as its cache makes it"
    (said,) = [note.text for note in result.notes if note.name == "kv-cache"]
    assert "in bfloat16 and computes in float32" in said
    # what a prefill computes it does not read from the cache
    (features,) = [site for site in result.sites if (site.site, site.step) == ("target.hidden.0", 0)]
    assert isinstance(features.metrics, Metrics)
    assert features.metrics.rho_median == 0.0 < features.metrics.rho_max < 2**-6
