"""SpecForge's own training forward beside the real SGLang and speculators, on the demo pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_trace import Trace, open_trace
from eagle_trace.demo import prompts_file
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.evidence.context import Checkpoints
from tests.support.pairs import TARGET

pytest.importorskip("specforge", reason="pip install --no-deps specforge")
from tests.support.specforge_drafts import exported, write_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Make = Callable[..., Trace]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The demo draft as SpecForge exports it, by what its config says of norm_output."""
    made: dict[str, Path] = {}

    def make(**flags: Any) -> Path:
        name = str(flags)
        if name not in made:
            made[name] = exported(tmp_path_factory.mktemp("specforge"), **flags)
        return made[name]

    return make


def compared(one: Trace, other: Trace) -> Diff:
    return diagnosed(diff(one, other), one, other)


def expect_healthy(result: Diff) -> None:
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert len(result.sites) >= 81
    assert result.coverage.share == 1.0
    assert result.coverage.matched > 100
    assert result.diagnosis is not None
    assert result.diagnosis.confirmed == ()


@pytest.mark.parametrize("features", ["compute", "serve"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_the_real_server_at_every_site_and_step(
    dtype: str, features: str, own: Callable[..., Path], serve: Make, train: Make
) -> None:
    served = serve(dtype=dtype)
    trained = train("specforge", draft=own(), target=TARGET, replay=served.path, features=features)
    assert trained.manifest.host == "specforge"
    assert trained.manifest.dtype == dtype
    expect_healthy(compared(trained, served))


def test_a_tree_is_replayed_but_for_rows_that_see_another_branch(
    own: Callable[..., Path], serve: Make, train: Make
) -> None:
    served = serve(topk=4, draft_tokens=8)
    expect_healthy(compared(train("specforge", draft=own(), replay=served.path), served))


def test_two_trainers_compute_the_same_forward(own: Callable[..., Path], serve: Make, train: Make) -> None:
    served = serve()
    one = train(replay=served.path)
    other = train("specforge", draft=own(), replay=served.path)
    assert [len(one.rows), len(other.rows)] == [len(served.rows)] * 2
    expect_healthy(compared(one, other))
    expect_healthy(compared(other, one))


def test_samples_of_its_own_training_are_features(
    own: Callable[..., Path], serve: Make, train: Make, tmp_path: Path
) -> None:
    served = serve()
    prompts = [row["token_ids"] for row in served.table("prompts").to_pylist()]
    folder = write_samples(tmp_path / "samples", prompts)
    trained = train("specforge", draft=own(), replay=served.path, features=str(folder))
    expect_healthy(compared(trained, served))


# ---- published heads: the format that servers load


def test_a_head_published_under_other_names_is_translated_and_says_so(deployed: Path, serve: Make, train: Make) -> None:
    served = serve()
    trained = train("specforge", draft=deployed, replay=served.path)
    said = trained.manifest.draft["translated"]
    assert any("layers.0.self_attn.q_proj.weight: midlayer" in one or "layers.0." in one for one in said), said
    assert any(one.startswith("norm_output false, as servers mean it") for one in said), said
    expect_healthy(compared(trained, served))


# ---- what norm_output means in 0.2.0


def test_the_manifest_says_what_the_release_computes(own: Callable[..., Path], serve: Make, train: Make) -> None:
    served = serve()
    plain = train("specforge", draft=own(), replay=served.path).manifest.draft
    assert (plain["norm_output"], plain["head_norm"]) == (False, True)
    assert plain["as_written"] == {"norm_output": None, "head_norm": None}
    off = train("specforge", draft=own(norm_output=False), replay=served.path).manifest.draft
    assert (off["norm_output"], off["head_norm"]) == (False, False)
    assert off["as_written"]["norm_output"] is False


def test_a_carry_that_servers_norm_parts_at_the_carry_of_the_first_step(
    own: Callable[..., Path], serve: Make, train: Make
) -> None:
    draft = own(norm_output=True)
    served = serve(draft=draft)
    trained = train("specforge", draft=draft, replay=served.path)
    result = compared(trained, served)
    assert result.verdict == "diverged"
    assert result.first_divergence is not None
    assert (result.first_divergence.site, result.first_divergence.step) == ("carry", 0)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == ["carry-norm"]


# ---- a training of its own, live


@pytest.fixture(scope="module")
def training(own: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], Path]:
    """A draft, some documents, and SpecForge's samples of them."""
    documents = [list(b"The return statement leaves a function. "), list(b"A class definition is short.")]
    folder = tmp_path_factory.mktemp("training")
    return own(), documents, write_samples(folder / "samples", documents)


def test_live_training_is_recorded_and_not_a_bit_of_it_changes(
    training: tuple[Path, list[list[int]], Path], train: Make, tmp_path: Path
) -> None:
    from eagle_trace_specforge import recording
    from tests.support import specforge_training as sf

    draft, documents, samples = training
    with sf.on_a_cpu():
        loop = sf.strategy(draft, tmp_path)
        given = sf.batch(samples, "0", "1")
        alone = sf.gradients(loop, given)
        with recording(loop, out=tmp_path / "live.trace", batches=1) as run:
            recorded = sf.gradients(loop, given)
        assert run.failure is None
        after = sf.gradients(loop, given)
    for name, value in alone.items():
        assert torch.equal(value, recorded[name]), name
        assert torch.equal(value, after[name]), name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.eagle3_model.modules())
    live = open_trace(tmp_path / "live.trace")
    assert [row["token_ids"] for row in live.table("prompts").to_pylist()] == documents
    assert live.manifest.settings["steps"] == sf.STEPS
    assert {row["name"] for row in live.table("metrics").to_pylist()} >= {"ploss", "acc", "acceptance_rate"}


def test_live_training_agrees_with_a_replay_of_the_same_documents(
    training: tuple[Path, list[list[int]], Path], train: Make, tmp_path: Path
) -> None:
    from eagle_trace_specforge import recording
    from tests.support import specforge_training as sf

    draft, _, samples = training
    with sf.on_a_cpu():
        loop = sf.strategy(draft, tmp_path)
        with recording(loop, out=tmp_path / "live.trace", batches=1):
            sf.gradients(loop, sf.batch(samples, "0", "1"))
    live = open_trace(tmp_path / "live.trace")
    prompts = tmp_path / "prompts.jsonl"
    ids = [row["token_ids"] for row in live.table("prompts").to_pylist()]
    prompts.write_text("\n".join(json.dumps({"input_ids": one}) for one in ids))
    alone = train("specforge", draft=draft, prompts=prompts, features=str(samples), dtype="float32", steps=sf.STEPS)
    result = compared(alone, live)
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert result.coverage.matched > 100


def test_a_training_command_is_armed_by_the_environment(
    training: tuple[Path, list[list[int]], Path], tmp_path: Path
) -> None:
    from eagle_trace_training.command import record_command

    draft, documents, samples = training
    code = (
        "import sys; from pathlib import Path; from tests.support import specforge_training as sf;"
        "draft, samples, folder = map(Path, sys.argv[1:]);"
        "loop = sf.strategy(draft, folder);"
        "context = sf.on_a_cpu(); context.__enter__();"
        "[sf.gradients(loop, sf.batch(samples, one)) for one in '01']"
    )
    command = [sys.executable, "-c", code, str(draft), str(samples), str(tmp_path)]
    recorded = record_command(command, out=tmp_path / "live.trace", batches=2)
    assert (recorded.status, recorded.problem) == (0, "")
    prompts = open_trace(tmp_path / "live.trace").table("prompts").to_pylist()
    # the last token is fed in none of the batch's rows
    assert [row["token_ids"] for row in prompts] == documents


def test_looks_at_a_live_training_are_tracked_by_their_names_and_change_not_a_bit_of_it(
    training: tuple[Path, list[list[int]], Path], serve: Make, train: Make, tmp_path: Path
) -> None:
    """Its own controller, two forwards to a step; a tracker takes each step once, as W&B does."""
    from eagle_trace.monitor import monitoring
    from tests.support import specforge_training as sf

    draft, _, samples = training
    served = serve()

    def trained(name: str, *, looked_at: bool) -> tuple[Any, Any, Any]:
        (tmp_path / name).mkdir()
        strategy = sf.strategy(draft, tmp_path / name)
        tracker = sf.Tracked(tmp_path / name)
        controller = sf.controller(strategy, tmp_path / name, tracker)
        look = monitoring(controller, served.path, target=TARGET, every=1) if looked_at else nullcontext()
        with sf.on_a_cpu(), look:
            assert controller.fit([sf.batch(samples, one) for one in "0101"]) == 2
        return strategy.eagle3_model.state_dict(), tracker, look

    alone, plain, _ = trained("alone", looked_at=False)
    weights, tracker, run = trained("looked-at", looked_at=True)
    assert run.failure is None
    assert weights.keys() == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in weights.items())
    assert "log" not in vars(tracker)
    assert tracker.refused == []
    predicted = diff(train("specforge", draft=draft, replay=served.path), served).accept_length.predicted
    assert [look.step for look in run.looks] == [0, 1, 2]
    assert run.looks[0].accept.predicted == predicted
    assert [look.where for look in run.looks] == ["none"] * 3
    # steps that the trainer logged before the look have its figures at the next one
    figures = [look.accept.predicted for look in run.looks]
    name = "eagle_trace/accept_length"
    rows = {step: row[name] for step, row in tracker.rows.items() if name in row}
    assert rows == {0: figures[0], 2: figures[1], 3: figures[2]}
    own = {step: {name for name in row if name.startswith("train/")} for step, row in tracker.rows.items()}
    assert {step: names for step, names in own.items() if names} == {step: set(row) for step, row in plain.rows.items()}


# ---- faults of 0.2.0 itself


def test_a_head_that_reads_the_stream_without_its_norm_is_named(
    own: Callable[..., Path], serve: Make, train: Make
) -> None:
    served = serve()
    result = compared(train("specforge", draft=own(norm_output=False), replay=served.path), served)
    assert result.first_divergence is not None
    assert (result.first_divergence.site, result.first_divergence.step) == ("norm", 0)
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.confirmed
    assert cause.cause == "head-norm"
    assert "norm_output" in str(cause.fix)


def test_rotary_tables_after_one_long_sequence_are_named_live(
    own: Callable[..., Path], serve: Make, tmp_path: Path
) -> None:
    from eagle_trace_specforge import recording
    from tests.support import specforge_training as sf

    draft = own()
    tables = json.loads((draft / "config.json").read_text())["max_position_embeddings"] + 20
    text = prompts_file().read_bytes()
    documents = [list(text[start : start + 120]) for start in (100, 300)]
    long = list((text * 4)[: tables + 1])
    samples = write_samples(tmp_path / "samples", [*documents, long], torch.bfloat16)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"input_ids": one}) for one in documents))
    served = serve(draft=draft, prompts=prompts, dtype="bfloat16", max_new_tokens=8)
    live = []
    with sf.on_a_cpu():
        loop = sf.strategy(draft, tmp_path, torch.bfloat16)
        for name in ("before", "after"):
            with recording(loop, out=tmp_path / name, batches=1):
                sf.gradients(loop, sf.batch(samples, "0", "1"))
            live.append(open_trace(tmp_path / name))
            sf.gradients(loop, sf.batch(samples, "2"))
    weights = Checkpoints(train_draft=draft)
    before, after = (diagnosed(diff(one, served), one, served, weights) for one in live)
    assert before.verdict == "agree", before.first_divergence
    assert "rope_rounded" not in live[0].manifest.draft
    assert live[1].manifest.draft["rope_rounded"] == "angles"
    assert after.first_divergence is not None
    assert (after.first_divergence.site, after.first_divergence.step) == ("layer.0.attn.q_rope", 0)
    assert after.diagnosis is not None
    assert [one.cause for one in after.diagnosis.confirmed] == ["rope-tables"]
