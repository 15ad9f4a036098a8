"""What single model classes of SGLang are given on a CPU, against the formulas of their GPU kernels."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
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


class LatentDraft:
    """What waits for the GPU when it is given an embedding."""

    def set_embed(self, embed: Any) -> None:
        torch.cuda.synchronize()
        self.embed = embed

    def set_embed_and_head(self, embed: Any, head: Any) -> None:
        torch.cuda.synchronize()
        self.embed, self.head = embed, head
        if head is None:
            raise ValueError("no head")


def test_a_draft_given_an_embedding_waits_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    module = type("module", (), {"Eagle3DeepseekV2ForCausalLM": LatentDraft})
    for _ in range(2):
        models._latent_draft(module)
    draft = LatentDraft()
    draft.set_embed(1)
    draft.set_embed_and_head(2, 3)
    assert (draft.embed, draft.head) == (2, 3)
    with pytest.raises(ValueError, match="no head"):
        draft.set_embed_and_head(4, None)
    # outside of these calls it is torch's own
    assert torch.cuda.synchronize is wait


RUNNER = """
import a_model


class ModelRunner:
    def load_model(self):
        return hasattr(a_model, "mended")
"""


@pytest.mark.parametrize("imported_before", [True, False], ids=["runner imported", "runner imported later"])
def test_models_are_mended_before_one_is_loaded(
    imported_before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that loads models may import their runner long behind its plugins."""
    (tmp_path / "a_runner.py").write_text(RUNNER)
    (tmp_path / "a_model.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_runner", "a_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    finders = list(sys.meta_path)
    monkeypatch.setattr(models, "_RUNNER", "a_runner")
    unknown: list[Any] = []
    monkeypatch.setattr(
        models, "_MENDED", {"a_model": lambda one: setattr(one, "mended", True), "no_such_model": unknown.append}
    )
    if imported_before:
        importlib.import_module("a_runner")
    models.mend_on_load()
    models.mend_on_load()
    runner = importlib.import_module("a_runner").ModelRunner()
    assert not hasattr(sys.modules["a_model"], "mended"), "not before a model is loaded"
    assert runner.load_model()
    assert not unknown
    assert sys.meta_path == finders, "nothing stays behind in the import system"
