"""Training on a device: each draft step leaves it in one copy, for which the training does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import open_trace
from eagle_trace.reader import Trace

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from eagle_trace_speculators import recording, trainer  # noqa: E402
from eagle_trace_speculators.host import HOST  # noqa: E402
from eagle_trace_training.session import Session  # noqa: E402
from tests.support.stand_in import Device, moved  # noqa: E402
from tests.support.tiny_speculators import Pair, random_prompts, write_pair, write_prompts  # noqa: E402
from tests.support.training import LOSS, collate, sample, trainable  # noqa: E402

STEPS = 3
TABLES = ("prompts", "rows", "topk", "metrics", "calls")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def batches(pair: Pair) -> list[dict[str, Any]]:
    samples = [sample(pair, ids, 4) for ids in random_prompts([9, 7, 12, 8])]
    return [collate(samples[:2]), collate(samples[2:])]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device().installed(monkeypatch) as one:
        yield one


def trained(pair: Pair, batches: list[dict[str, Any]], out: Path, **options: Any) -> Trace:
    model = trainable(pair)
    with recording(model, out=out, batches=len(batches), **options):
        for batch in batches:
            model(**batch, ttt_steps=STEPS, loss_config=LOSS)
    return open_trace(out)


def assert_same(one: Trace, other: Trace, tables: tuple[str, ...]) -> None:
    for name in tables:
        assert one.table(name).equals(other.table(name)), name
    assert one.sites == other.sites
    for site in one.sites:
        np.testing.assert_array_equal(one.values(site), other.values(site))


@pytest.mark.parametrize("options", [{}, {"steps": 2}])
def test_a_step_of_a_training_costs_one_transfer_and_no_wait(
    pair: Pair, batches: list[dict[str, Any]], device: Device, tmp_path: Path, options: dict[str, Any]
) -> None:
    here = trained(pair, batches, tmp_path / "here.trace", **options)
    assert not device.transfers
    there = trained(pair, [moved(batch) for batch in batches], tmp_path / "there.trace", **options)
    assert there.manifest.stopped is None
    assert device.blocking == []
    assert len(device.transfers) == STEPS * len(batches)
    assert_same(here, there, TABLES)
    assert here.manifest.prompts_digest == there.manifest.prompts_digest


@pytest.mark.parametrize("level", ["stats", "sketch"])
def test_a_training_is_reduced_on_its_device(
    pair: Pair, batches: list[dict[str, Any]], device: Device, tmp_path: Path, level: str
) -> None:
    whole = trained(pair, [moved(batch) for batch in batches], tmp_path / "whole.trace")
    bytes_whole = sum(device.transfers)
    device.transfers.clear()
    here = trained(pair, batches, tmp_path / "here.trace", level=level)
    there = trained(pair, [moved(batch) for batch in batches], tmp_path / "there.trace", level=level)
    assert device.blocking == []
    assert len(device.transfers) == STEPS * len(batches)
    # rows of this draft are 32 wide, so a sketch is as wide; of real ones a hundredth leaves the device
    assert sum(device.transfers) < (0.4 if level == "stats" else 2.5) * bytes_whole
    assert here.sites == there.sites == whole.sites
    for site in here.sites:
        np.testing.assert_allclose(here.statistics(site).norm, there.statistics(site).norm, rtol=1e-6)
    best = [trace.table("topk").to_pandas() for trace in (here, there)]
    assert best[0].drop(columns="logprob").equals(best[1].drop(columns="logprob"))


def test_a_forward_run_for_its_trace_costs_one_transfer_and_no_wait(
    pair: Pair, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", random_prompts([9, 12]))
    asked: dict[str, Any] = {
        "draft": pair.draft, "target": pair.target, "prompts": prompts, "steps": STEPS, "device": "cpu",
    }  # fmt: skip
    here = open_trace(HOST.record(out=tmp_path / "here.trace", **asked))
    uncompiled, fused = trainer.uncompiled, Session._fused
    calls: list[int] = []

    def on_device(forward: Any) -> Any:
        def call(model: Any, **given: Any) -> Any:
            calls.append(1)
            return uncompiled(forward)(model, **moved(given))

        return call

    monkeypatch.setattr(trainer, "uncompiled", on_device)
    monkeypatch.setattr(Session, "_fused", lambda *args, **options: moved(fused(*args, **options)))
    there = open_trace(HOST.record(out=tmp_path / "there.trace", **asked))
    assert device.blocking == []
    # each pack is run once for the trace and once in the dtype one higher, all of its steps at a time
    assert len(device.transfers) == len(calls)
    assert_same(here, there, ("prompts", "rows", "topk", "floors", "calls"))
