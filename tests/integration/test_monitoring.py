"""Looking at a draft while it trains: what is logged is what `diff` says, and the training does not notice.

The trainers are speculators' own `Trainer` and SpecForge's own `TrainerController`, with the loggers that they bring;
what is replayed is a recording of the real server.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama as llama

pytest.importorskip("speculators")

from speculators.models.eagle3 import core
from speculators.train import trainer
from speculators.train.logger import setup_metric_logger

from eagle_trace import Trace, monitor
from eagle_trace.demo import prompts_file
from eagle_trace.errors import EagleTraceError
from eagle_trace.jobs import monitoring as jobs
from eagle_trace.jobs.looks import NOWHERE, Look
from eagle_trace.jobs.monitoring import Monitoring
from eagle_trace.monitor import monitoring
from eagle_trace.recording.forward import Forward
from eagle_trace.recording.hooks import Hooks
from eagle_trace.writer import TraceWriter
from eagle_trace_analysis import diff
from eagle_trace_training.session import Session
from tests.support.pairs import DRAFT, TARGET
from tests.support.tiny_speculators import Pair
from tests.support.training import LOSS, collate, sample, trainable, trainer_of, without_accelerator

pytestmark = pytest.mark.integration

STEPS, EVERY = 5, 2
PAIR = Pair(TARGET, DRAFT)
KIMI = TARGET.parent / "kimi"
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
    made = trainer_of(trainable(PAIR), samples, out, STEPS)
    if around is None:
        made.run_training()
        return made, None
    with around(made) as run:
        made.run_training()
    return made, run


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


def rounded_rotation(model: Any) -> None:
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16().float()


@pytest.fixture
def seeing_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training mask that lets a row see the one behind it."""
    original = core.create_combined_mask_mod

    def peeking(documents: Any, rows: int, sliding_window: int | None = None) -> Any:
        allowed = original(documents, rows, sliding_window=sliding_window)
        return lambda b, h, q, kv: allowed(b, h, torch.clamp(q + 1, max=rows - 1), kv)

    monkeypatch.setattr(core, "create_combined_mask_mod", peeking)


def looks_at(model: Any, served: Trace, batch: dict[str, Any], **options: Any) -> list[Look]:
    """Looks before and after one step of a loop of one's own, which moves the weights."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
    said: list[tuple[int, dict[str, Any]]] = []
    with monitoring(
        model, served.path, every=1, log=lambda values, step: said.append((step, dict(values))), **options
    ) as run:
        model(**batch, ttt_steps=3, loss_config=LOSS)[1].backward()
        optimizer.step()
    assert run.failure is None
    assert said == [(look.step, look.values()) for look in run.looks]
    assert [look.step for look in run.looks] == [0, 1]
    return run.looks


@pytest.fixture(scope="module")
def batch(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return collate(samples[:2], rows=128)


@pytest.mark.parametrize(
    ("plant", "site", "cause"),
    [
        pytest.param(off_by_one, "topk.target_id", "d2t-stale", id="d2t-off-by-one"),
        pytest.param(another_layer, "target.hidden.1", "layer-ids-shifted", id="features-of-another-layer"),
        pytest.param(another_embedding, "embed", "weights-differ", id="frozen-embedding"),
        pytest.param(rounded_rotation, "layer.0.attn.q_rope", None, id="rotation"),
    ],
)
def test_a_fault_is_named_at_its_site_also_when_the_weights_have_moved(
    plant: Callable[[Any], None], site: str, cause: str | None, served: Trace, batch: dict[str, Any]
) -> None:
    model = trainable(PAIR)
    plant(model)
    before, after = looks_at(model, served, batch, target=TARGET)
    for look in (before, after):
        assert look.first is not None
        assert (look.first.site, look.first.step) == (site, 0)
        assert look.where.startswith(f"{site}, step 0")
    assert cause is None or cause in before.causes
    assert before.place == after.place != NOWHERE


@pytest.mark.usefixtures("seeing_the_next")
def test_a_mask_that_shows_a_row_what_comes_next_is_named_whatever_the_weights(
    served: Trace, batch: dict[str, Any]
) -> None:
    for look in looks_at(trainable(PAIR), served, batch, target=TARGET):
        assert look.first is not None
        assert (look.first.site, look.first.step) == ("layer.0.attn.context", 0)


def test_a_draft_with_flex_attention_is_looked_at_with_features_of_the_server_and_against_a_baseline(
    served: Trace, train: Callable[..., Trace], batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only runs on a GPU need not run: the twin computes with eager attention."""
    model = trainable(PAIR)
    config = model.config.transformer_layer_config
    model._attn_impl, config._attn_implementation = "simple_flex_attention", "simple_flex_attention"
    baseline = train(replay=served.path)
    run = monitoring(model, served.path, baseline=baseline.path, log=lambda *_: None)
    with run:
        pass
    (look,) = run.looks
    assert (look.first, look.accept.predicted) == (None, diff(baseline, served).accept_length.predicted)
    assert (model._attn_impl, config._attn_implementation) == ("simple_flex_attention",) * 2


# ---- a command that is not edited


@pytest.mark.parametrize("package", ["eagle_trace_speculators", "eagle_trace_specforge"])
def test_the_classes_that_are_waited_for_are_there(package: str) -> None:
    pytest.importorskip(package.removeprefix("eagle_trace_"))
    for module, (kind, method) in import_module(f"{package}.watch").TRAINERS.items():
        assert callable(getattr(getattr(import_module(module), kind), method))


def test_a_trainer_is_looked_at_by_the_environment_alone(
    alone: list[Any],
    samples: list[dict[str, Any]],
    served: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = SimpleNamespace(Trainer=type("Trainer", (trainer.Trainer,), {}))
    monitor._around("Trainer", "run_training", module)
    monkeypatch.setattr(trainer, "Trainer", module.Trainer)
    monkeypatch.setenv("EAGLE_TRACE_MONITOR", str(served.path))
    monkeypatch.setenv("EAGLE_TRACE_MONITOR_TARGET", str(TARGET))
    monkeypatch.setenv("EAGLE_TRACE_MONITOR_EVERY", "100")
    caplog.set_level(logging.INFO, "speculators.metrics")
    assert same(alone, left_behind(trained(samples, tmp_path / "looked-at")[0]))
    logged = [one for one in caplog.records if isinstance(one.msg, dict) and "eagle_trace/accept_length" in one.msg]
    assert [one.step for one in logged] == [0, STEPS]  # type: ignore[attr-defined]
    monkeypatch.setenv("EAGLE_TRACE_MONITOR_EVERY", "often")
    assert same(alone, left_behind(trained(samples, tmp_path / "refused")[0]))
    said = [one.message for one in caplog.records if one.name == "eagle_trace" and one.levelno >= logging.WARNING]
    assert said == [
        "eagle-trace does not look at this training: EAGLE_TRACE_MONITOR_EVERY must be a number, not 'often'"
    ]


# ---- what goes wrong


def test_what_fails_in_a_look_is_said_once_and_the_training_ends_as_alone(
    alone: list[Any],
    samples: list[dict[str, Any]],
    served: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def broken(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Session, "_record", broken)
    trainer, run = trained(samples, tmp_path, lambda one: monitoring(one, served.path, target=TARGET, every=EVERY))
    assert (len(calls), str(run.failure), run.looks) == (1, "CUDA out of memory", [])
    (said,) = [one.message for one in caplog.records if one.name == "eagle_trace" and one.levelno >= logging.WARNING]
    assert said.startswith("eagle-trace no longer looks at this training: RuntimeError: CUDA out of memory; the ")
    assert same(alone, left_behind(trainer))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in trainer.model.modules())


#: where a look is when it is interrupted: owner and name of what is called then
PLACES: dict[str, tuple[Any, str]] = {
    "before a forward": (Session, "_record"),
    "in the middle of a forward": (Forward, "take"),
    "while the trace is sealed": (TraceWriter, "seal"),
    "while its own steps are recomputed": (jobs, "own_fault"),
    "while it is logged": (Look, "values"),
}


def kill_in(patch: pytest.MonkeyPatch, place: str, number: int) -> None:
    """Have a signal come while a look is at a place."""
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*args, **options)

    patch.setattr(owner, name, interrupted)


def around_the_process() -> list[Any]:
    """What a look might leave behind outside the model."""
    memory = fsspec.filesystem("memory")
    writers = [one.name for one in threading.enumerate() if one.name == "eagle-trace-writer"]
    modes = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
    return [modes, torch.get_num_threads(), llama.apply_rotary_pos_emb, memory.find("/"), writers]


def hooks_of(model: Any) -> list[Any]:
    return [one for module in model.modules() for one in (*module._forward_hooks, *module._forward_pre_hooks)]


@pytest.mark.parametrize(
    ("place", "number"), list(zip(PLACES, itertools.cycle([signal.SIGINT, signal.SIGTERM]), strict=False)), ids=str
)
def test_a_trainer_that_is_interrupted_in_a_look_is_interrupted_and_left_as_it_was(
    place: str, number: int, samples: list[dict[str, Any]], served: Trace, tmp_path: Path
) -> None:
    """speculators' signal handler raises wherever the process is, and its trainer then saves a checkpoint."""
    before = around_the_process()

    def killed(one: Any) -> Any:
        hooks = Hooks()
        hooks.before(one.model, lambda *_: os.kill(os.getpid(), number))
        return hooks

    alone, _ = trained(samples, tmp_path / "alone", killed)
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, place, number)
        looked, run = trained(
            samples, tmp_path / "looked-at", lambda one: monitoring(one, served.path, target=TARGET, every=EVERY)
        )
    assert (looked.global_step, run.failure, len(run.looks)) == (0, None, place == "while it is logged")
    assert (tmp_path / "looked-at" / "interrupted").is_dir()
    assert same(left_behind(alone), left_behind(looked))
    assert hooks_of(looked.model) == []
    assert around_the_process() == before


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_of_ones_own_gets_its_interrupt_and_is_left_as_it_was(
    place: str, batch: dict[str, Any], served: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = trainable(PAIR), around_the_process()
    held = {name: one.clone() for name, one in model.state_dict().items()}
    drawn, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    kill_in(monkeypatch, place, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), monitoring(model, served.path, features="serve") as run:
        model(**batch, ttt_steps=3, loss_config=LOSS)
    assert run.failure is None
    assert same(model.state_dict(), held)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert hooks_of(model) == []
    assert around_the_process() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be 1 or more optimizer steps, not 0"),
        ({"features": "compute"}, "features='compute' runs the target: give target"),
        ({"prompts": "p.jsonl"}, "give prompts only beside a running server's URL"),
        ({"served": "http://127.0.0.1:1"}, "is a running server: give prompts to ask it"),
        ({"every": 2.5}, "every must be 1 or more optimizer steps, not 2.5"),
        ({"level": "all"}, "level must be one of"),
        ({"device": "tpu"}, "must be auto, cpu or cuda, not 'tpu'"),
        ({"served": "http://127.0.0.1:1", "prompts": "/nowhere/p.jsonl"}, "cannot read prompts from /nowhere/p.jsonl"),
        ({"target": KIMI / "target"}, "is 96 wide and the draft takes 3 layers as 384 numbers"),
        ({"evry": 3}, "unexpected keyword argument 'evry'"),
        ({"served": "/nowhere/serve.trace"}, "/nowhere/serve.trace"),
        ({"trainer": torch.nn.Linear(1, 1)}, "takes speculators' Eagle3DraftModel"),
    ],
)
def test_misuse_is_said_before_the_training_starts(options: dict[str, Any], words: str, served: Trace) -> None:
    given = {"served": served.path} | options
    trainer = given.pop("trainer", None)
    with pytest.raises(EagleTraceError, match=re.escape(words)), monitoring(trainer or trainable(PAIR), **given):
        pass
