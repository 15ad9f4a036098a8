"""The conformance kit: a host of a few lines passes it, and each promise that such a host breaks is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Tap
from eagle_trace.selection import EVERYTHING
from eagle_trace.testing import conformance
from eagle_trace_serving.batches import Batch
from eagle_trace_serving.recording import Recording
from tests.support.fake_host import FACTS, FakeHost

pytestmark = pytest.mark.slow


def test_a_host_of_a_few_lines_keeps_every_promise(tmp_path: Path) -> None:
    assert conformance(FakeHost(), tmp_path) == []


class OtherName(FakeHost):
    def __init__(self) -> None:
        super().__init__()
        self.facts = replace(FACTS, host="another")


class LosesASite(FakeHost):
    def taps(self) -> list[Tap]:
        return [tap for tap in super().taps() if tap.site != "layer.0.mlp.act"]


class SaysSo(LosesASite):
    def __init__(self) -> None:
        super().__init__()
        said = {"site": "layer.0.mlp.act", "rows": "all", "why": "it has none"}
        self.facts = replace(FACTS, not_materialised=[said])


class InventsASite(FakeHost):
    def taps(self) -> list[Tap]:
        return [*super().taps(), replace(super().taps()[0], site="layer.0.attn.invented")]


class LeavesAHook(FakeHost):
    def record(self, out: Path, **options: Any) -> list[float]:
        Hooks().after(self.draft.places[0], lambda *_: None)
        return super().record(out, **options)


class ChangesItsOutput(FakeHost):
    def record(self, out: Path, **options: Any) -> list[float]:
        return [number + 1 for number in super().record(out, **options)]


class ForgetsTheBudget(FakeHost):
    def record(self, out: Path, *, max_bytes: int | None = None, **options: Any) -> list[float]:
        return super().record(out, **options)


class ForgetsTheSelection(FakeHost):
    def record(self, out: Path, *, selection: Any = None, **options: Any) -> list[float]:
        return super().record(out, selection=EVERYTHING, **options)


class ForgetsTheLevel(FakeHost):
    def record(self, out: Path, *, level: str = "", **options: Any) -> list[float]:
        return super().record(out, **options)


class DoesNotSeal(FakeHost):
    def seal(self, recording: Recording) -> None:
        recording.abort(RuntimeError("no"))


class FeedsAnotherToken(FakeHost):
    def batches(self) -> list[Batch]:
        first, *rest = super().batches()
        return [replace(first, tensors=first.tensors | {"input_ids": first.tensors["input_ids"] + 1}), *rest]


class CountsItsParametersTwice(FakeHost):
    def __init__(self) -> None:
        super().__init__()
        named = self.draft.named_parameters
        self.draft.named_parameters = lambda: [*named(), *named()]  # type: ignore[method-assign,assignment]


class ListsNoParameter(FakeHost):
    def __init__(self) -> None:
        super().__init__()
        self.draft.named_parameters = list  # type: ignore[method-assign,assignment]


class WrongInWhatItSays(OtherName, LosesASite, FeedsAnotherToken, CountsItsParametersTwice):
    """What a trace says of itself."""


class WrongInWhatItDoes(
    LeavesAHook,
    ChangesItsOutput,
    ForgetsTheBudget,
    ForgetsTheSelection,
    ForgetsTheLevel,
    InventsASite,
    ListsNoParameter,
):
    """What a host does, and what its recordings say of one another."""


#: how each host breaks which promise
BREAKS = {
    WrongInWhatItSays: [
        "it says serve of another",
        "layer.0.mlp.act lacks",
        "not the prompt's next",
        "parameters are listed twice",
    ],
    WrongInWhatItDoes: [
        "hooks hang in the draft afterwards",
        "puts out something else while it is recorded",
        "half of the bytes were allowed",
        "the selection leaves",
        "it is of level values",
        "names of no site: layer.0.attn.invented",
        "it lists no parameter",
    ],
    DoesNotSeal: ["it cannot be read"],
}


@pytest.mark.parametrize("host", BREAKS)
def test_every_promise_that_is_broken_is_named(host: type[FakeHost], tmp_path: Path) -> None:
    broken = conformance(host(), tmp_path)
    for words in BREAKS[host]:
        assert any(words in problem for problem in broken), (words, broken)


def test_a_site_that_is_said_to_be_missing_may_be_missing(tmp_path: Path) -> None:
    assert conformance(SaysSo(), tmp_path) == []
