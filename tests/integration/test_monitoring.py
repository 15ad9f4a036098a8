"""Looking at a draft while it trains: what is logged is what `diff` says, and the training does not notice.

The trainers are speculators' own `Trainer` and SpecForge's own `TrainerController`, with the loggers they bring; what is
replayed is a recording of the real server.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("speculators")

from speculators.train.graceful_shutdown import TrainingInterruptedError
from speculators.train.logger import setup_metric_logger

from eagle_trace import Trace, open_trace
from eagle_trace.demo import prompts_file
from eagle_trace.errors import UsageError
from eagle_trace.jobs.monitoring import NOWHERE, Monitoring
from eagle_trace.monitor import monitoring
from eagle_trace_analysis import diff
from eagle_trace_training.session import Session
from tests.support.pairs import DRAFT, TARGET
from tests.support.tiny_speculators import Pair
from tests.support.training import LOSS, collate, sample, trainable, trainer_of, without_accelerator

pytestmark = pytest.mark.integration

STEPS, EVERY = 5, 2
PAIR = Pair(TARGET, DRAFT)
LAYER_IDS = json.loads((DRAFT / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
#: where speculators and the looks log
METRICS = logging.getLogger("speculators.metrics")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with without_accelerator():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(serve: Callable[..., Trace]) -> Trace:
    return serve()


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    text = prompts_file().read_bytes()
    documents = [list(text[start : start + 40]) for start in range(0, 240, 40)]
    assert all(documents)
    return [sample(PAIR, ids, 4, LAYER_IDS) for ids in documents]


class Run:
    """W&B's run as speculators uses it: steps that lie behind are refused, as W&B drops them."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.refused: list[int] = []

    def log(self, values: Mapping[str, Any], step: int, commit: bool = False) -> None:
        if step < max(self.rows, default=0):
            self.refused.append(step)
            return
        self.rows.setdefault(step, {}).update(values)
        if commit:
            self.rows.setdefault(step + 1, {})


def left_behind(trainer: Any) -> list[Any]:
    """Everything a training leaves behind that a look might have changed."""
    state = [trainer.model.state_dict(), [one.state_dict() for one in trainer.optimizers]]
    grads = {name: one.grad for name, one in trainer.model.named_parameters()}
    modes = [module.training for module in trainer.model.modules()]
    return [*state, grads, modes, torch.get_rng_state(), random.getstate(), np.random.get_state()]


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal to the last bit."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def trained(samples: list[dict[str, Any]], out: Path, around: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
    """speculators' trainer after its last step, and what was around it."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    trainer = trainer_of(trainable(PAIR), samples, out, STEPS)
    if around is None:
        trainer.run_training()
        return trainer, None
    with around(trainer) as run:
        trainer.run_training()
    return trainer, run


@dataclass
class Monitored:
    trainer: Any
    run: Monitoring
    left: list[Any]
    wandb: Run
    board: Path
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture(scope="module")
def alone(samples: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return left_behind(trained(samples, tmp_path_factory.mktemp("alone"))[0])


@pytest.fixture(scope="module")
def monitored(samples: list[dict[str, Any]], served: Trace, tmp_path_factory: pytest.TempPathFactory) -> Monitored:
    """A training with looks at it, logged by speculators' own handlers for W&B and (where it is there) TensorBoard."""
    folder = tmp_path_factory.mktemp("monitored")
    wandb, logged = Run(), []
    stand_in = ModuleType("wandb")
    stand_in.init = lambda **_: wandb  # type: ignore[attr-defined]

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.msg, dict) and any(name.startswith("eagle_trace/") for name in record.msg):
                logged.append((record.step, record.msg))  # type: ignore[attr-defined]

    sink = Sink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", stand_in)
        setup_metric_logger([*board(), "wandb"], "run", folder / "logs")
        METRICS.addHandler(sink)
        try:
            trainer, run = trained(
                samples, folder / "out", lambda one: monitoring(one, served.path, target=TARGET, every=EVERY)
            )
        finally:
            for handler in list(METRICS.handlers):
                METRICS.removeHandler(handler)
                handler.close()
    return Monitored(trainer, run, left_behind(trainer), wandb, folder / "logs", logged)


def board() -> list[str]:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        return []
    return ["tensorboard"]


def test_weights_gradients_optimizer_and_random_state_are_the_same_to_the_last_bit(
    alone: list[Any], monitored: Monitored
) -> None:
    assert monitored.run.failure is None
    assert [look.step for look in monitored.run.looks] == [0, 2, 4, STEPS]
    assert same(alone, monitored.left)
    modules = [monitored.trainer.model, *monitored.trainer.model.modules()]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in modules)


def test_the_accept_length_is_what_diff_predicts_of_a_recording_of_the_same_weights(
    monitored: Monitored, served: Trace, train: Callable[..., Trace], tmp_path: Path
) -> None:
    def predicted(draft: Path) -> Any:
        return diff(train(draft=draft, replay=served.path), served).accept_length

    first, last = monitored.run.looks[0], monitored.run.looks[-1]
    monitored.trainer.model.save_pretrained(tmp_path / "trained")
    for look, draft in ((first, DRAFT), (last, tmp_path / "trained")):
        accept = predicted(draft)
        assert look.accept.predicted == accept.predicted
        assert look.accept.predicted_by_depth == accept.predicted_by_depth
    assert first.accept.predicted != last.accept.predicted
    assert first.accept.predicted == pytest.approx(served_length(served), rel=0.02)


def served_length(served: Trace) -> float:
    """What the server itself counted."""
    counts = served.manifest.settings["server_counts"].values()
    return sum(one["spec_accept_length"] * one["spec_verify_ct"] for one in counts) / sum(
        one["spec_verify_ct"] for one in counts
    )


def test_the_trainers_loggers_are_given_each_look_at_its_step(monitored: Monitored) -> None:
    looks = {look.step: look.values() for look in monitored.run.looks}
    assert dict(monitored.logged) == looks
    assert monitored.wandb.refused == []
    for step, values in looks.items():
        row = monitored.wandb.rows[step]
        assert {name: row[name] for name in values} == values
        assert step == STEPS or row["global_step"] == step, "beside the trainer's own metrics of that step"
        assert values["eagle_trace/first_divergence"] == NOWHERE
        assert values["eagle_trace/first_divergence_at"] == "none"


def test_tensorboards_event_files_hold_the_curves(monitored: Monitored) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in monitored.board.rglob("events.out.*")}
    read = EventAccumulator(str(events))
    read.Reload()
    for name in ("accept_length", "accept_share_1", "first_divergence"):
        curve = {one.step: one.value for one in read.Scalars(f"eagle_trace/{name}")}
        expected = {look.step: look.values()[f"eagle_trace/{name}"] for look in monitored.run.looks}
        assert curve == pytest.approx(expected, rel=1e-6)
    (first, *_) = read.Tensors("eagle_trace/first_divergence_at/text_summary")
    assert first.tensor_proto.string_val[0] == b"none"
    assert read.Scalars("train/loss")


# ---- faults in what the training does not move


def off_by_one(model: Any) -> None:
    model.d2t += 1


def another_layer(model: Any) -> None:
    first, second, third = model.config.eagle_aux_hidden_state_layer_ids
    model.config.eagle_aux_hidden_state_layer_ids = [first, second - 1, third]


def another_embedding(model: Any) -> None:
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] += 0.5


@pytest.mark.parametrize(
    ("plant", "site", "cause"),
    [
        pytest.param(off_by_one, "topk.target_id", "d2t-missing", id="d2t-off-by-one"),
        pytest.param(another_layer, "target.hidden.1", "layer-ids", id="features-of-another-layer"),
        pytest.param(another_embedding, "embed", "weights-differ", id="embedding"),
        pytest.param(None, None, None, id="healthy"),
    ],
)
def test_a_fault_is_named_at_its_site_although_the_weights_have_moved(
    plant: Callable[[Any], None] | None,
    site: str | None,
    cause: str | None,
    served: Trace,
    samples: list[dict[str, Any]],
) -> None:
    model = trainable(PAIR)
    if plant is not None:
        plant(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    batch = collate(samples[:2], rows=128)
    with monitoring(model, served.path, target=TARGET, every=1) as run:
        for _ in range(2):
            loss = model(**batch, ttt_steps=3, loss_config=LOSS)[1]
            loss.backward()
            optimizer.step()
    assert run.failure is None
    for look in run.looks:
        assert (look.first.site if look.first is not None else None) == site
        assert (look.place == NOWHERE) == (site is None)
        print(look.step, look.where, look.place)
    assert run.looks[0].accept.predicted != run.looks[2].accept.predicted or plant is off_by_one
