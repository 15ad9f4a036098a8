"""What single model classes of SGLang are given on a CPU, against the formulas of their GPU kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from sglang_cpu_eagle import models  # noqa: E402


def rms(x: Any, weight: Any, eps: float) -> Any:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("ranks", [1, 2])
def test_queries_and_keys_are_normed_over_all_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    q, k, w, v = torch.randn(5, 16), torch.randn(5, 8), torch.randn(16), torch.randn(8)
    parts = [(q.chunk(ranks, -1)[r], k.chunk(ranks, -1)[r], w.chunk(ranks)[r], v.chunk(ranks)[r]) for r in range(ranks)]
    sums = sum(models.sums_of_squares(a, b) for a, b, _, _ in parts)
    done = [models.norm_by_sums(*part, sums, ranks, 1e-5) for part in parts]
    torch.testing.assert_close(torch.cat([a for a, _ in done], -1).double(), rms(q, w, 1e-5), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([b for _, b in done], -1).double(), rms(k, v, 1e-5), rtol=0, atol=1e-6)


class Chosen(NamedTuple):
    topk_weights: Any
    topk_ids: Any


@dataclass(frozen=True)
class Settings:
    apply_router_weight_on_input: bool


def squares(_layer: Any, x: Any, chosen: Chosen, settings: Settings) -> Any:
    """An expert that is not linear, and weighs its output; as SGLang's, it refuses to weigh its input."""
    assert not settings.apply_router_weight_on_input
    return x.square() * chosen.topk_weights


def test_a_router_weight_goes_onto_the_input_where_the_class_asks_for_it() -> None:
    x, chosen = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Chosen(torch.tensor([[0.5], [2.0]]), torch.tensor([[0], [1]]))
    run = models.weighing_input(squares)
    torch.testing.assert_close(run(None, x, chosen, Settings(False)), x.square() * chosen.topk_weights)
    torch.testing.assert_close(run(None, x, chosen, Settings(True)), (x * chosen.topk_weights).square())


def test_models_are_mended_before_one_is_loaded_and_only_where_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    there = ModuleType("a_model")
    monkeypatch.setitem(sys.modules, "a_model", there)
    monkeypatch.setattr(
        models, "_MENDED", {"a_model": lambda one: setattr(one, "mended", True), "no_such_model": seen.append}
    )

    class ModelRunner:
        def load_model(self) -> str:
            seen.append(hasattr(there, "mended"))
            return "loaded"

    monkeypatch.delitem(sys.modules, models._RUNNER, raising=False)
    models.mend_on_load()
    monkeypatch.setitem(sys.modules, models._RUNNER, SimpleNamespace(ModelRunner=ModelRunner))
    assert ModelRunner().load_model() == "loaded"
    models.mend_on_load()
    assert ModelRunner().load_model() == "loaded"
    assert seen == [False, True]
