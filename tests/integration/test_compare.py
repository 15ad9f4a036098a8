"""`eagle-trace compare` on the demo pair and the real hosts: healthy, faulty, dying, killed, one server and two."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace.jobs.comparison import Comparison
from eagle_trace.jobs.tokens import compare_tokens
from eagle_trace.monitor import monitoring
from tests.support import faults
from tests.support.attached import server
from tests.support.endings import ending_of
from tests.support.pairs import DRAFT, TARGET
from tests.support.tiny_speculators import Pair
from tests.support.training import trainable
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

Compare = Callable[..., Result]


@pytest.fixture
def compare(four_prompts: Path, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Run the command on the demo's target and four prompts; what is not kept goes to a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: object, prompts: bool = True) -> Result:
        given = ["--target", TARGET, "--max-new-tokens", "16", *(("--prompts", four_prompts) if prompts else ())]
        with warm():
            return CliRunner().invoke(app, ["compare", *map(str, [*given, *words])])

    return run


def changed(deployed: Path, out: Path, change: Callable[[Any], object]) -> Path:
    """A copy of the deployed folder with another config."""
    shutil.copytree(deployed, out)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_trained_draft_alone_is_exported_and_agrees(compare: Compare, tmp_path: Path) -> None:
    done = compare("--trained", DRAFT, prompts=False)
    assert done.exit_code == 0, done.output
    last = ending_of(done.stdout)
    assert last[0].startswith("agree: ")
    assert last[-1].startswith(("next: eagle-trace ", "  eagle-trace "))
    assert "--keep compared" in last[-1]
    assert len(last) <= 12
    assert "eight prompts of our own" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.trace")), "a finished comparison leaves nothing behind"


def test_a_faulty_deployment_ends_with_its_cause_and_fix_and_is_used_again(
    compare: Compare, deployed: Path, tmp_path: Path
) -> None:
    broken = changed(deployed, tmp_path / "broken", faults.single_layer_features)
    words = ["--trained", DRAFT, "--deployed", broken, "--keep", tmp_path / "kept"]
    done = compare(*words, "--report", tmp_path / "report.html")
    assert done.exit_code == 1, done.output
    last = ending_of(done.stdout)
    assert last[0] == "diverged: train and serve first part at fused, step 0 (shape)"
    assert any(line.startswith("cause: single-layer-features") for line in last)
    assert any(line.startswith("  fix: set eagle_config.use_aux_hidden_state to true") for line in last)
    # too long for a line: on one of its own
    traces = f"{tmp_path}/kept/train.trace {tmp_path}/kept/serve.trace"
    assert last[-2:] == ["next:", f"  eagle-trace diff {traces} --verbose"]
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert len(last) <= 12
    assert "fused" in (tmp_path / "report.html").read_text()
    before = [open_trace(tmp_path / "kept" / name).manifest.created for name in ("serve.trace", "train.trace")]
    again = compare(*words)
    assert ending_of(again.stdout) == last
    assert again.stderr.count("was recorded before from the same inputs") == 2
    after = [open_trace(tmp_path / "kept" / name).manifest.created for name in ("serve.trace", "train.trace")]
    assert after == before
    assert "was recorded before" not in compare(*words, "--steps", "2").stderr, "other options are other inputs"


def test_what_a_killed_run_recorded_is_used_again(
    compare: Compare, deployed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["--trained", DRAFT, "--deployed", deployed]
    with monkeypatch.context() as patch:
        patch.setattr(Comparison, "_train", killed)
        assert compare(*words).exit_code == 130
    (left,) = (tmp_path / "cache").rglob("serve.trace")
    recorded = open_trace(left).manifest.recording
    done = compare(*words)
    assert done.exit_code == 0, done.output
    assert "serve.trace was recorded before from the same inputs: used again" in done.stderr
    assert recorded
    assert not left.exists()


def test_a_check_that_no_server_gets_over_stops_it_before_anything_runs(
    compare: Compare, deployed: Path, tmp_path: Path
) -> None:
    broken = changed(deployed, tmp_path / "null", lambda config: config.update(attention_bias=None))
    done = compare("--trained", DRAFT, "--deployed", broken)
    assert done.exit_code == 1, done.output
    assert "not run: the check config failed" in done.stdout
    assert "leave attention_bias out" in " ".join(done.stdout.split()) or "attention_bias" in done.stdout
    assert "starting" not in done.stderr


def test_a_server_that_dies_while_starting_is_explained_by_the_checks(
    compare: Compare, deployed: Path, tmp_path: Path
) -> None:
    broken = changed(deployed, tmp_path / "narrow", lambda _: None)
    tensors = load_file(broken / "model.safetensors")
    save_file(
        tensors | {"fc.weight": np.ascontiguousarray(tensors["fc.weight"][:, :256])}, broken / "model.safetensors"
    )
    done = compare("--trained", DRAFT, "--deployed", broken)
    assert done.exit_code == 2, done.output
    assert "SGLang ended before the recording was done" in done.stderr
    assert "what check says of it: fc-width: fc.weight is [128, 256]" in done.stderr
    assert "fix: " in done.stderr.strip().splitlines()[-1]
    assert not list((tmp_path / "cache").rglob("serve.trace"))


def test_a_deployed_folder_alone_is_its_own_reference(compare: Compare, deployed: Path) -> None:
    done = compare("--deployed", deployed)
    assert done.exit_code == 0, done.output
    assert "what the deployed folder says is taken for the training" in done.stderr
    assert "rows have a train row (100%)" in done.stdout


def test_two_environments_are_compared_with_the_floors_of_the_training(
    compare: Compare, deployed: Path, tmp_path: Path
) -> None:
    words = ["--trained", DRAFT, "--deployed", deployed, "--env", sys.executable, "--env", sys.executable]
    done = compare(*words, "--keep", tmp_path / "kept", "--verbose")
    assert done.exit_code == 0, done.output
    last = ending_of(done.stdout)
    assert last[0].startswith("agree: ")
    assert "rows of B have one in A (100%)" in " ".join(last)
    assert "lends the measured one" in " ".join(done.stdout.split())
    assert {path.name for path in (tmp_path / "kept").glob("*.trace")} == {"serve.trace", "other.trace", "train.trace"}


@pytest.fixture(scope="module")
def running(deployed: Path, folder: Path, warm: Warm) -> Iterator[str]:
    """URL of a server that its user started."""
    place = folder / "against"
    place.mkdir()
    chain = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--disable-radix-cache"]
    with warm(), server(place, TARGET, deployed, *chain, EAGLE_TRACE_REQUESTS="0") as started:
        yield started.url


def test_a_server_that_runs_already_is_compared_with_the_training(compare: Compare, running: str) -> None:
    done = compare("--trained", DRAFT, "--against", running)
    assert done.exit_code == 0, done.output
    assert ending_of(done.stdout)[0].startswith("agree: ")


def test_a_servers_tokens_are_those_of_trainings_tokenizer(running: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "Hello"}\n{"messages": [{"role": "user", "content": "How are you?"}]}\n')
    tokens = list(compare_tokens(TARGET, asked, running))
    assert [(one.at, one.training == one.serving) for one in tokens] == [(None, True)] * 2


def test_a_draft_in_training_is_held_against_a_server_that_runs(running: str, four_prompts: Path) -> None:
    """Recorded anew at each look; weights that training has moved are no fault, a vocabulary map that it has is."""
    model = trainable(Pair(TARGET, DRAFT))
    given = {"prompts": four_prompts, "target": TARGET, "every": 1, "max_new_tokens": 16}
    values = []
    with monitoring(model, running, log=lambda found, _: values.append(found), **given) as run:
        run._called()  # as the first forward does
        with torch.no_grad():
            model.fc.weight.mul_(1.5)
        model.d2t += 1
    assert run.failure is None
    first, last = run.looks
    assert (first.where, last.first.site) == ("none", "topk.target_id")
    assert first.accept.observed == last.accept.observed
    assert first.accept.predicted == pytest.approx(first.accept.observed, rel=0.1)
    assert values[0]["eagle_trace/first_divergence"] == -1
