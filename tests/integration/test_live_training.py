"""Recording a model that trains: what is recorded is what was trained on, and the training does not notice.

The loop is a user's own on speculators' real forward, packing and loss (tests/support/training.py); the last tests run
speculators' own trainer, and serve a recorded batch to SGLang.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle_trace.errors import EagleTraceError, OutputExistsError, UsageError
from eagle_trace.manifest import OPEN_SEAL
from eagle_trace.prompts import read_prompts, tokenize
from eagle_trace.reader import Trace, open_trace
from eagle_trace.recording import forward
from eagle_trace.selection import Selection
from eagle_trace.writer import DP_STRIDE

pytest.importorskip("speculators")

from speculators.train.graceful_shutdown import TrainingInterruptedError
from transformers import AutoTokenizer

from eagle_trace.demo import prompts_file
from eagle_trace_speculators import recording
from eagle_trace_training import live_batches
from eagle_trace_training.command import record_command
from eagle_trace_training.first_tokens import UNKNOWN
from tests.support.pairs import DRAFT, TARGET
from tests.support.tiny_speculators import TTT_STEPS, Pair, random_prompts, write_pair
from tests.support.training import LOSS, Loop, collate, sample, trainable, trainer_command, write_training_data

pytestmark = pytest.mark.integration

#: the last batch's second document does not fit and is cut off by the packing
DOCUMENTS = random_prompts([9, 5, 13, 12, 30])
PACKS = [[0, 1, 2], [3, 0], [1, 4]]
#: where the answer of each document begins; the loss counts all of the second one, right behind the first one's end
ANSWERS = [4, 0, 4, 4, 4]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def samples(pair: Pair) -> list[dict[str, Any]]:
    return [sample(pair, ids, answer) for ids, answer in zip(DOCUMENTS, ANSWERS, strict=True)]


@pytest.fixture(scope="module")
def batches(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [collate([samples[number] for number in pack]) for pack in PACKS]


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture(scope="module")
def untouched(pair: Pair, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    """What the training leaves behind that is not recorded."""
    loop = Loop(trainable(pair))
    for batch in batches:
        loop.step(batch)
    return loop.left.tensors()


def assert_untouched(loop: Loop, untouched: list[torch.Tensor]) -> None:
    left = loop.left.tensors()
    assert len(left) == len(untouched)
    assert all(torch.equal(one, other) for one, other in zip(left, untouched, strict=True))
    assert hooks_of(loop.model) == 0
    assert "forward" not in vars(loop.model)


@pytest.fixture(scope="module")
def recorded(
    pair: Pair,
    batches: list[dict[str, Any]],
    untouched: list[torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trace:
    """All three batches, of which the recording keeps two; the training is checked on the way."""
    loop = Loop(trainable(pair))
    out = tmp_path_factory.mktemp("recorded") / "t.trace"
    with recording(loop.model, out=out, batches=2, dataset=DOCUMENTS) as run:
        for number, batch in enumerate(batches):
            assert run.done == (number == 2)
            loop.step(batch)
            assert number < 1 or run.wait()
            assert open_trace(out, allow_partial=True).sealed == (number >= 1), "sealed in the middle of the block"
        assert hooks_of(loop.model) == 0
    assert run.failure is None
    assert_untouched(loop, untouched)
    return open_trace(out)


def test_each_document_of_each_batch_is_a_prompt_with_its_first_token(recorded: Trace) -> None:
    expected = [DOCUMENTS[number] for pack in PACKS[:2] for number in pack]
    assert [list(ids) for ids in recorded.prompts["token_ids"]] == expected
    keys = recorded.prompts["prompt_key"].tolist()
    assert keys[4] == f"{keys[0]}#2", "the same document again"
    assert recorded.prompts["request_id"].tolist()[3] == "batch 1, document 0"


def test_rows_are_all_roots_and_steps_whose_token_is_the_documents_own(recorded: Trace) -> None:
    rows = recorded.rows
    lengths = [len(DOCUMENTS[number]) for pack in PACKS[:2] for number in pack]
    assert set(zip(rows.prompt_id.tolist(), rows.root.tolist(), rows.step.tolist(), strict=True)) == {
        (prompt, root, step)
        for prompt, length in enumerate(lengths)
        for step in range(TTT_STEPS)
        for root in range(length - 1 - step)
    }
    tokens = recorded.prompts["token_ids"].tolist()
    for prompt, root, step, token, position, path in zip(
        rows.prompt_id, rows.root, rows.step, rows.token_id, rows.position, rows.paths(), strict=True
    ):
        assert token == tokens[prompt][root + 1 + step]
        assert path == tuple(tokens[prompt][root + 2 : root + 2 + step])
        assert position == 1 + root + step, "training's positions start at 1"


def test_values_are_those_of_the_forward(pair: Pair, batches: list[dict[str, Any]], recorded: Trace) -> None:
    """The first batch again, without recording, with hooks of the test's own."""
    model, seen = trainable(pair), {"fc": [], "lm_head": []}  # type: ignore[var-annotated]
    for name, found in seen.items():
        model.get_submodule(name).register_forward_hook(lambda _m, _a, out, found=found: found.append(out.detach()[0]))
    torch.manual_seed(7)
    noisy = batches[0]["hidden_states"] + 1e-3 * torch.randn(batches[0]["hidden_states"].shape)
    model(**batches[0] | {"hidden_states": noisy}, ttt_steps=TTT_STEPS, loss_config=LOSS)
    start = np.concatenate([[0], np.cumsum([len(DOCUMENTS[number]) - 1 for number in PACKS[0]])])
    for site, outputs in (("fused", [noisy[0]]), ("fc.out", seen["fc"]), ("logits", seen["lm_head"])):
        keys, values = recorded.keys(site), recorded.values(site)
        mine = np.flatnonzero(keys.prompt_id < 3)
        assert set(keys.step[mine].tolist()) == set(range(len(outputs)))
        for at in mine:
            expected = outputs[keys.step[at]][start[keys.prompt_id[at]] + keys.root[at]].numpy()
            assert np.array_equal(values[at], expected), f"{site} of row {at}"


def test_masks_labels_loss_and_metrics_are_the_trainings(
    pair: Pair, samples: list[dict[str, Any]], recorded: Trace, untouched: list[torch.Tensor]
) -> None:
    model = trainable(pair)
    labels = [
        model.verifier_lm_head(model.verifier_norm(one["verifier_last_hidden_states"])).argmax(-1) for one in samples
    ]
    documents = [number for pack in PACKS[:2] for number in pack]
    for row in recorded.table("rows").to_pylist():
        fed = row["root"] + 1 + row["step"]
        assert row["loss_mask"] == (fed >= ANSWERS[documents[row["prompt_id"]]])
        assert row["label"] == int(labels[documents[row["prompt_id"]]][fed])
    metrics = recorded.table("metrics").to_pandas()
    total = metrics[metrics["name"] == "loss"].set_index("batch")["value"]
    assert total.tolist() == [float(loss) for loss in untouched[:2]]
    steps = metrics[metrics["name"].str.fullmatch(r"loss_\d_sum")]
    assert steps["step"].tolist() == [0, 1, 2] * 2
    assert steps["call_id"].tolist() == list(range(6))
    assert np.allclose(steps.groupby("batch")["value"].sum(), total)


def test_rows_of_other_documents_that_the_loss_counts_are_counted(recorded: Trace) -> None:
    rows, metrics = recorded.table("rows").to_pandas(), recorded.metrics.set_index(["call_id", "name"])["value"]
    leaking = []
    for call in range(6):
        step = call % TTT_STEPS
        counted = metrics[call, f"full_acc_{step}_total"]
        data = int(rows["loss_mask"][rows["call_id"] == call].sum())
        leaking.append(int(metrics.get((call, live_batches.LEAKING), 0)))
        assert data + leaking[-1] == counted, "what speculators counts is data, or leaks"
    assert leaking == [0, 1, 2, 0, 0, 0]


def test_the_manifest_says_how_it_trained(recorded: Trace) -> None:
    manifest = recorded.manifest
    assert (manifest.side, manifest.dtype, manifest.device, manifest.stopped) == ("train", "float32", "cpu", None)
    settings = {"batches": 2, "recorded_batches": 2, "steps": 3, "attention": "eager", "autocast": None}
    assert settings.items() <= manifest.settings.items()
    assert manifest.draft["layer_ids"] == [1, 2, 4]
    assert manifest.draft["path"] is None, "what is on disk is not what trains"
    assert len(manifest.warnings) == 1
    assert "the parameters moved after batch 0" in manifest.warnings[0]


def train(pair: Pair, fed: list[dict[str, Any]], out: Path, **options: Any) -> tuple[Trace, Loop]:
    loop = Loop(trainable(pair))
    with recording(loop.model, out=out, **options):
        for batch in fed:
            loop.step(batch)
    return open_trace(out), loop


def test_a_first_token_that_nobody_knows_is_said(pair: Pair, batches: list[dict[str, Any]], tmp_path: Path) -> None:
    trace, _ = train(pair, batches[:1], tmp_path / "t", batches=1, level="shapes")
    assert [ids[0] for ids in trace.prompts["token_ids"]] == [UNKNOWN] * 3
    assert any("first token of 3 of 3 documents is not known" in warning for warning in trace.manifest.warnings)
    given, _ = train(pair, batches[:1], tmp_path / "given", batches=1, level="shapes", first_token=2)
    assert [ids[0] for ids in given.prompts["token_ids"]] == [2] * 3


def test_a_document_cut_off_by_the_packing_is_found(pair: Pair, batches: list[dict[str, Any]], tmp_path: Path) -> None:
    trace, _ = train(pair, batches[2:], tmp_path / "t", batches=1, level="shapes", dataset=DOCUMENTS)
    assert list(trace.prompts["token_ids"][1]) == DOCUMENTS[4][:29], "28 rows were left, x_0 in front of them"


def test_a_selection_keeps_the_rows_it_names_and_all_shapes(
    pair: Pair, batches: list[dict[str, Any]], recorded: Trace, tmp_path: Path
) -> None:
    chosen = Selection.parse(sites="fc.out,topk.*", prompts="1:4")
    trace, _ = train(pair, batches, tmp_path / "t", selection=chosen, steps=2)
    assert trace.sites == ["fc.out"]
    assert trace.shapes == recorded.shapes
    rows = trace.rows
    assert (set(rows.prompt_id.tolist()), set(rows.step.tolist())) == ({1, 2, 3}, {0, 1})
    assert trace.table("topk").filter(trace.table("topk").column("rank").to_numpy() == 0).num_rows == len(rows)
    assert trace.manifest.settings["selection"]["steps"] == [[0, 2]]


def test_a_byte_budget_ends_the_recording_after_a_whole_step(
    pair: Pair, batches: list[dict[str, Any]], untouched: list[torch.Tensor], tmp_path: Path
) -> None:
    trace, loop = train(pair, batches, tmp_path / "t", max_bytes=10_000)
    assert trace.manifest.stopped == "max-bytes"
    assert trace.rows.step.tolist() == [0] * len(trace.keys("logits"))
    assert_untouched(loop, untouched)


@pytest.mark.parametrize("level", ["shapes", "stats"])
def test_lower_levels_keep_less(pair: Pair, batches: list[dict[str, Any]], level: str, tmp_path: Path) -> None:
    trace, _ = train(pair, batches[:1], tmp_path / "t", batches=1, level=level)
    assert len(trace.rows) == 63
    assert bool(trace.site_data("fc.out")) == (level == "stats")
    assert (trace.table("topk").num_rows > 0) == (level == "stats")


# ---- how a recording ends -------------------------------------------------------------------------------------


def test_a_block_that_ends_early_is_said(pair: Pair, batches: list[dict[str, Any]], tmp_path: Path) -> None:
    trace, loop = train(pair, batches[:1], tmp_path / "t", batches=5)
    assert trace.manifest.stopped == "the block ended after 1 of 5 batches"
    assert hooks_of(loop.model) == 0


def test_a_block_that_raises_is_said_and_raises(pair: Pair, batches: list[dict[str, Any]], tmp_path: Path) -> None:
    loop = Loop(trainable(pair))

    def train_and_fail() -> None:
        with recording(loop.model, out=tmp_path / "t", batches=5):
            loop.step(batches[0])
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    trace = open_trace(tmp_path / "t")
    assert trace.manifest.stopped == "the block raised ZeroDivisionError: division by zero after 1 of 5 batches"
    assert hooks_of(loop.model) == 0


def test_a_forward_that_raised_ends_the_recording_and_not_the_training(
    pair: Pair, batches: list[dict[str, Any]], tmp_path: Path
) -> None:
    loop = Loop(trainable(pair))
    with recording(loop.model, out=tmp_path / "t") as run:
        with pytest.raises(RuntimeError):
            # the loss of step 0 fails on it
            loop.step(batches[0] | {"verifier_last_hidden_states": torch.zeros(1, 3, 32)})
        loop.step(batches[1])
    trace = open_trace(tmp_path / "t")
    assert "the forward before this one raised" in str(run.failure)
    assert "the recorder failed in batch 0" in str(trace.manifest.stopped)
    assert trace.rows.step.tolist() == [0] * len(trace.keys("logits")), "what was computed of it is kept"
    assert trace.table("rows").column("label").null_count == len(trace.rows)
    assert hooks_of(loop.model) == 0


def test_batches_of_padding_alone_do_not_count(pair: Pair, batches: list[dict[str, Any]], tmp_path: Path) -> None:
    loop = Loop(trainable(pair))
    with recording(loop.model, out=tmp_path / "t", batches=1) as run:
        loop.model(**collate([]), ttt_steps=1, loss_config=LOSS)
        assert (run.batches, run.done) == (0, False)
        loop.step(batches[0])
    assert run.batches == 1


def _raise(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("a bug\nin two lines")


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "in a site": lambda patch: patch.setattr(forward.Forward, "take", _raise),
    "in the thread that writes": lambda patch: patch.setattr(forward, "best_ids", _raise),
    "in the middle of the metrics": lambda patch: patch.setattr(live_batches.BatchTaker, "_keep_metrics", _raise),
    "while hanging hooks": lambda patch: patch.setattr("eagle_trace_speculators.live.SiteTap", _raise),
    "on the disk": lambda patch: patch.setattr("eagle_trace.parts.PartStream._open", _raise),
}


#: where the trace is written, so that it stays as it was saved last
WRITING = ("on the disk", "in the thread that writes")


@pytest.mark.parametrize("where", FAILURES)
def test_what_fails_in_the_recorder_is_said_once_and_never_reaches_the_training(
    where: str,
    pair: Pair,
    batches: list[dict[str, Any]],
    untouched: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FAILURES[where](monkeypatch)
    loop = Loop(trainable(pair))
    with caplog.at_level(logging.WARNING, "eagle_trace"), recording(loop.model, out=tmp_path / "t") as run:
        for batch in batches:
            loop.step(batch)
    assert_untouched(loop, untouched)
    (said,) = [record for record in caplog.records if record.name == "eagle_trace"]
    assert "a bug" in said.getMessage()
    assert "in two lines" not in said.getMessage()
    assert "a bug" in str(run.failure)
    kept = json.loads((tmp_path / "t" / (OPEN_SEAL if where in WRITING else "manifest.json")).read_text())
    assert "a bug" in str(kept["stopped"])


def test_a_trainer_that_is_interrupted_in_a_hook_is_interrupted(
    pair: Pair, batches: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speculators' signal handler raises wherever the process is."""

    def interrupted(*_: Any) -> None:
        raise TrainingInterruptedError("SIGINT")

    monkeypatch.setattr(forward.Forward, "take", interrupted)
    loop = Loop(trainable(pair))
    with pytest.raises(TrainingInterruptedError), recording(loop.model, out=tmp_path / "t") as run:
        loop.step(batches[0])
    assert run.failure is None
    assert hooks_of(loop.model) == 0
    assert "TrainingInterruptedError: SIGINT" in str(open_trace(tmp_path / "t").manifest.stopped)


MISUSE: dict[str, tuple[dict[str, Any], type[EagleTraceError], str]] = {
    "no draft": ({"model": torch.nn.Linear(2, 2)}, UsageError, "not Linear"),
    "no batches": ({"batches": 0}, UsageError, "1 or more"),
    "unknown level": ({"level": "all"}, UsageError, "level must be one of"),
    "no bytes": ({"max_bytes": 0}, UsageError, "positive"),
    "no steps": ({"steps": 0}, UsageError, "steps must be 1 or more"),
    "no token": ({"first_token": -1}, UsageError, "must be a token id"),
    "no dataset": ({"dataset": 5}, UsageError, "cannot look up"),
    "taken": ({"out": None}, OutputExistsError, "exists"),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_said_before_the_training_starts(misuse: str, recorded: Trace, pair: Pair, tmp_path: Path) -> None:
    options, error, message = MISUSE[misuse]
    given = {"model": trainable(pair), "out": tmp_path / "t"} | options
    model, out = given.pop("model"), given.pop("out") or recorded.path
    with pytest.raises(error, match=message), recording(model, out=out, **given):
        pytest.fail("the training started")
    assert hooks_of(model) == 0
    assert not (tmp_path / "t").exists()
    assert recorded.path.exists()


# ---- wrapped models -------------------------------------------------------------------------------------------


def test_a_model_given_to_torch_compile_is_recorded_uncompiled_and_compiled_afterwards(
    pair: Pair, batches: list[dict[str, Any]], tmp_path: Path
) -> None:
    compiled: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model = trainable(pair)
    wrapped = torch.compile(model, backend=backend)
    with recording(wrapped, out=tmp_path / "t", batches=1, level="stats"):
        wrapped(**batches[0], ttt_steps=2, loss_config=LOSS)
        assert not compiled
    trace = open_trace(tmp_path / "t")
    assert "nothing was run compiled while recording" in trace.manifest.changes[0]
    assert set(trace.rows.step.tolist()) == {0, 1}
    try:
        wrapped(**batches[0], ttt_steps=2, loss_config=LOSS)
        assert compiled, "the training goes on compiled"
    finally:
        torch.compiler.reset()


def test_a_forward_that_speculators_compiled_is_replaced_while_recording(
    pair: Pair, batches: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where `conditional_torch_compile` wraps the forward when the class is made."""
    model, draft = trainable(pair), type(trainable(pair))
    original, called = draft.forward, []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return original(*args, **kwargs)

    compiled._torchdynamo_orig_callable = original  # type: ignore[attr-defined]
    monkeypatch.setattr(draft, "forward", compiled)
    with recording(model, out=tmp_path / "t", batches=1, level="stats"):
        model(**batches[0], ttt_steps=1, loss_config=LOSS)
        assert not called
        model(**batches[0], ttt_steps=1, loss_config=LOSS)
    assert called == [1], "compiled again as soon as the recording is over"
    assert "the forward was run uncompiled" in open_trace(tmp_path / "t").manifest.changes[0]


def test_ranks_of_distributed_training_write_side_by_side(pair: Pair, tmp_path: Path) -> None:
    """Two processes under DistributedDataParallel, each with documents of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.distributed", str(pair.target), str(pair.draft), str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    trace = open_trace(tmp_path / "t.trace")
    assert trace.manifest.ranks == 2
    assert trace.prompts["prompt_id"].tolist() == [0, 1, DP_STRIDE, DP_STRIDE + 1]
    assert sorted(set(trace.rows.call_id.tolist())) == [0, 1, 2, DP_STRIDE, DP_STRIDE + 1, DP_STRIDE + 2]
    assert not trace.params.canonical_name.duplicated().any()
    assert {file.name for file in Path(trace.path).glob("values/*/*")} == {
        "rank0-00000.parquet",
        "rank1-00000.parquet",
    }


# ---- speculators' own trainer ---------------------------------------------------------------------------------


def test_speculators_own_trainer_is_recorded_and_ends_with_the_same_weights(
    pair: Pair, samples: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its command, dataset and loader; a worker process loads the batches in the recorded run."""
    data = write_training_data(tmp_path / "data", samples)
    alone = trainer_command(pair, data, tmp_path / "alone", "--num-workers", "0")
    subprocess.run(alone, check=True, capture_output=True)
    command = trainer_command(pair, data, tmp_path / "watched", "--num-workers", "1")
    recorded = record_command(command, out=tmp_path / "t.trace", batches=1)
    assert (recorded.status, recorded.problem) == (0, "")
    assert "Training epoch 1/1 completed" in capfd.readouterr().out, "the command's output passes through"
    trace = open_trace(tmp_path / "t.trace")
    assert trace.manifest.argv[1:] == command[2:]
    assert trace.manifest.settings["recorded_batches"] == 1
    # the validation share of the data is not trained on
    documents = {tuple(ids) for ids in trace.prompts["token_ids"]}
    assert documents
    assert all(any(ids == tuple(whole[: len(ids)]) for whole in DOCUMENTS[:4]) for ids in documents)
    weights = [load_file(tmp_path / name / "0" / "model.safetensors") for name in ("alone", "watched")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# ---- the same documents, served -------------------------------------------------------------------------------


def test_a_real_training_batch_and_the_real_server_agree(serve: Callable[..., Trace], tmp_path: Path) -> None:
    from eagle_trace_analysis import diff

    pair = Pair(TARGET, DRAFT)
    layer_ids = json.loads((DRAFT / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    documents = [tokenize(prompt, tokenizer) for prompt in read_prompts(prompts_file())[:2]]
    batch = collate([sample(pair, ids, len(ids) // 2, layer_ids) for ids in documents], rows=128)
    model = trainable(pair)
    with recording(model, out=tmp_path / "train.trace", batches=1, dataset=documents):
        model(**batch, ttt_steps=3, loss_config=LOSS)[1].backward()
    trained = open_trace(tmp_path / "train.trace")
    served = serve(prompts=trained.path, max_new_tokens=4)
    assert served.prompts["prompt_key"].tolist() == trained.prompts["prompt_key"].tolist()
    result = diff(trained, served)
    assert result.exit_status == 0
    compared = {one.site for one in result.sites if one.step == 0 and one.verdict == "agree"}
    assert {"token", "position", "fused", "fc.out", "embed", "layer.0.attn.context", "layer.0.out", "norm"} <= compared
    assert result.coverage.matched == sum(len(ids) - 1 for ids in documents)
