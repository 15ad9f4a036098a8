"""The serve recorder on the real SGLang: it keeps what the server did, and the server does the same without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from eagle_trace import Trace, open_trace
from eagle_trace.capture import LEVELS
from eagle_trace.errors import CheckpointError, HostError, OutputExistsError, PromptsError, UsageError
from eagle_trace.prompts import read_prompts
from eagle_trace.sites import draft_sites
from tests.support.pairs import TARGET
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration

Make = Callable[..., Trace]


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not [process.cmdline() for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_every_site_is_recorded(serve: Make) -> None:
    trace = serve()
    everything = [site.name for site in draft_sites(3, 1) if site.kind == "value"]
    assert trace.sites == everything
    for site in trace.sites:
        assert np.isfinite(trace.values(site)).all(), site


def test_rows_are_the_tokens_the_server_committed_and_nothing_else(serve: Make) -> None:
    trace = serve()
    rows = trace.rows
    tokens = dict(zip(trace.prompts.prompt_id, trace.prompts.token_ids, strict=True))
    first = np.flatnonzero(rows.step == 0)
    assert [int(tokens[rows.prompt_id[i]][rows.root[i] + 1]) for i in first] == rows.token_id[first].tolist()
    # each root once, from the first token on, without a gap
    for prompt_id, ids in tokens.items():
        roots = np.sort(rows.root[first][rows.prompt_id[first] == prompt_id])
        assert roots.tolist() == list(range(len(ids) - 1))
    for prompt in trace.prompts.itertuples():
        assert list(prompt.token_ids[prompt.num_prompt_tokens :])[: len(prompt.output_ids)] == list(prompt.output_ids)


def test_rounds_add_up_to_what_the_server_counts(serve: Make) -> None:
    trace = serve()
    counts = trace.manifest.settings["server_counts"]
    for prompt in trace.prompts.itertuples():
        rounds = trace.rounds[trace.rounds.prompt_id == prompt.prompt_id]
        assert len(rounds) == counts[prompt.request_id]["spec_verify_ct"]
        committed = prompt.num_prompt_tokens + 1 + sum(len(accepted) + 1 for accepted in rounds.accepted)
        assert committed == len(prompt.token_ids)


def test_values_are_those_of_the_checkpoint_on_the_recorded_input(serve: Make, deployed: Path) -> None:
    trace = serve()
    weights = {name: tensor.float().numpy() for name, tensor in load_file(deployed / "model.safetensors").items()}
    fused = trace.values("fused")
    np.testing.assert_allclose(fused @ weights["fc.weight"].T, trace.values("fc.out"), rtol=1e-4, atol=1e-5)
    parts = np.concatenate([trace.values(f"target.hidden.{k}") for k in range(3)], axis=1)
    np.testing.assert_array_equal(parts, fused)
    residual = trace.values("hidden") + trace.values("layer.0.attn.out")
    np.testing.assert_allclose(residual, trace.values("layer.0.attn.residual"), rtol=1e-4, atol=1e-5)
    gate, up = trace.values("layer.0.mlp.gate"), trace.values("layer.0.mlp.up")
    np.testing.assert_allclose(gate / (1 + np.exp(-gate)) * up, trace.values("layer.0.mlp.act"), rtol=1e-4, atol=1e-5)


def test_topk_is_mapped_to_target_ids_as_the_worker_does(serve: Make, deployed: Path) -> None:
    trace = serve()
    d2t = load_file(deployed / "model.safetensors")["d2t"].numpy()
    ids = trace.topk.draft_id.to_numpy()
    np.testing.assert_array_equal(trace.topk.target_id, ids + d2t[ids])
    drafted = trace.rows.token_id[trace.rows.step == 1]
    best = trace.topk[(trace.topk.step == 0) & (trace.topk["rank"] == 0)].set_index(["prompt_id", "root"]).target_id
    rows = trace.rows
    first = np.flatnonzero(rows.step == 1)
    assert [best[(rows.prompt_id[i], rows.root[i])] for i in first] == drafted.tolist()


def test_parameters_are_found_in_the_checkpoint(serve: Make) -> None:
    params = serve().params
    assert params.in_checkpoint.all()
    assert not params.nonfinite.any()
    assert {"fc.weight", "lm_head.weight", "d2t", "layers.0.self_attn.q_proj.weight"} <= set(params.canonical_name)


def test_the_answers_are_the_same_with_and_without_recording(
    deployed: Path, four_prompts: Path, tmp_path: Path, warm: Warm
) -> None:
    from eagle_trace_serving.host import ServerOptions
    from eagle_trace_serving.requests import Request
    from eagle_trace_serving.server import Server

    request = Request(read_prompts(four_prompts), max_new_tokens=24)
    with warm(), Server(ServerOptions(TARGET, deployed, dtype="float32")) as server:
        before = server.answer(request)
        recorded = {}
        for level in LEVELS:
            (tmp_path / level).mkdir()
            recorded[level] = server.record(request, tmp_path / level, level=level)
        after = server.answer(request)
    assert before == after
    for level, answers in recorded.items():
        assert answers == before, level
    shapes, stats, sketch, values = (open_trace(tmp_path / level) for level in recorded)
    assert shapes.sites == stats.sites == sketch.sites == values.sites
    assert shapes.shapes == values.shapes
    np.testing.assert_array_equal(stats.statistics("fc.out").norm, values.statistics("fc.out").norm)
    for site in ("fused", "fc.out", "logits"):
        np.testing.assert_allclose(sketch.sketch(site), values.sketch(site), rtol=1e-6, atol=1e-9)


def test_a_byte_budget_stops_the_recording_and_not_the_server(
    deployed: Path, four_prompts: Path, tmp_path: Path, warm: Warm
) -> None:
    from eagle_trace_serving.host import ServerOptions
    from eagle_trace_serving.requests import Request
    from eagle_trace_serving.server import Server

    request = Request(read_prompts(four_prompts), max_new_tokens=24)
    with warm(), Server(ServerOptions(TARGET, deployed, dtype="float32")) as server:
        everything = server.answer(request)
        assert server.record(request, tmp_path, max_bytes=3_000_000) == everything
    trace = open_trace(tmp_path)
    assert trace.manifest.stopped == "max-bytes"
    # every call that was kept is whole
    assert {len(trace.keys(site)) for site in ("embed", "norm", "carry")} == {len(trace.rows)}


def test_chunked_prefill_and_prefix_cache_record_what_is_computed(serve: Make) -> None:
    trace = serve(batch_size=2, host_args=("--chunked-prefill-size", "16", "--enable-radix-cache"), max_new_tokens=8)
    rows = trace.rows
    for prompt in trace.prompts.itertuples():
        roots = rows.root[(rows.prompt_id == prompt.prompt_id) & (rows.step == 0)]
        assert len(set(roots.tolist())) == len(roots)
    assert (trace.calls["mode"] == "EXTEND").sum() > 4


# ---- bad input ------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, deployed: Path, four_prompts: Path, **changed: Any) -> dict[str, Any]:
    return {"target": TARGET, "draft": deployed, "prompts": four_prompts, "out": tmp_path / "out"} | changed


def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, deployed: Path, four_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_trace.demo import models_dir
    from eagle_trace_serving.record import record

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(subprocess, "Popen", started)

    def refused(error: type[Exception], message: str, **changed: Any) -> None:
        with pytest.raises(error, match=message):
            record(**asked(tmp_path, deployed, four_prompts, **changed))
        assert not (tmp_path / "out").exists()

    refused(CheckpointError, "eagle-trace export", draft=models_dir() / "draft")
    refused(CheckpointError, "no folder", draft=tmp_path / "nowhere")
    refused(CheckpointError, "is no EAGLE-3 draft", draft=TARGET)
    refused(PromptsError, "cannot read", prompts=tmp_path / "nowhere.jsonl")
    refused(UsageError, "--steps must be", steps=0)
    refused(UsageError, "--dtype must be", dtype="int3")
    refused(UsageError, "each replica answers other requests", host_args=("--tp", "2", "--dp", "2"))
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((TARGET / "config.json").read_text()) | {"hidden_size": 64}
    (other / "config.json").write_text(json.dumps(config))
    refused(CheckpointError, "do not fit: the target is 64 wide, and the draft takes features of 128", target=other)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    refused(OutputExistsError, "choose another --out", out=taken)


def test_a_server_that_dies_while_starting_is_reported_with_its_last_lines(
    tmp_path: Path, deployed: Path, four_prompts: Path, warm: Warm
) -> None:
    from eagle_trace_serving.record import record

    with warm(), pytest.raises(HostError, match=r"(?s)ended before.*no-such-option"):
        record(**asked(tmp_path, deployed, four_prompts, host_args=("--no-such-option",)))
    assert not (tmp_path / "out").exists()


def test_a_plugin_that_is_not_loaded_is_noticed(
    tmp_path: Path, deployed: Path, four_prompts: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm
) -> None:
    from eagle_trace_serving.record import record

    # SGLang then cannot run EAGLE on this CPU either, so what is seen is a host that dies or a recorder that is silent
    monkeypatch.setenv("SGLANG_PLUGINS", "somebody_else")
    with warm(), pytest.raises(HostError, match=r"recorder did not report|ended before"):
        record(**asked(tmp_path, deployed, four_prompts))


def test_ctrl_c_leaves_no_process_and_a_sealed_trace_or_none(
    tmp_path: Path, deployed: Path, four_prompts: Path
) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "eagle_trace.cli.main", "record", "--mode", "serve", "--target", str(TARGET),
        "--draft", str(deployed), "--prompts", str(four_prompts), "--out", str(out), "--max-new-tokens", "900",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ,
        # tests that run in a shell's background were told to ignore it, and so would every process they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("recording"):
            break
    tree = psutil.Process(process.pid).children(recursive=True)
    assert tree
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in error
    # what came before it is kept, if anything did; a trace that was not sealed would not open
    assert len(open_trace(out).rows) if out.exists() else "nothing was sealed" in error
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive


def test_ctrl_c_while_the_server_starts_leaves_nothing(
    tmp_path: Path, deployed: Path, four_prompts: Path, warm: Warm, interrupts: None
) -> None:
    from eagle_trace_serving.record import record

    with warm(), pytest.raises(KeyboardInterrupt) as caught:
        record(**asked(tmp_path, deployed, four_prompts, progress=interrupting("starting")))
    assert not (tmp_path / "out").exists()
    assert not hasattr(caught.value, "__notes__")


def test_what_was_recorded_before_ctrl_c_is_sealed_and_where_that_is_nothing_nothing_is_left(
    tmp_path: Path, deployed: Path, four_prompts: Path, warm: Warm, interrupts: None
) -> None:
    from eagle_trace_serving.host import ServerOptions
    from eagle_trace_serving.requests import Request
    from eagle_trace_serving.server import Server

    request, heard = Request(read_prompts(four_prompts), max_new_tokens=24, batch_size=1), {"word": "recording"}
    early, late = tmp_path / "early.trace", tmp_path / "late.trace"
    early.mkdir()
    late.mkdir()
    options = ServerOptions(TARGET, deployed, dtype="float32")
    with warm(), Server(options, lambda text: interrupting(heard["word"])(text)) as server:
        with pytest.raises(KeyboardInterrupt):
            server.record(request, early)
        heard["word"] = "2 of 4 prompts answered"
        with pytest.raises(KeyboardInterrupt) as caught:
            server.record(request, late)
    assert list(early.iterdir()) == []
    assert caught.value.__notes__ == [f"what was recorded up to here is sealed in {late}"]
    trace = open_trace(late)
    ended = dict(zip(trace.prompts.request_id, trace.prompts.finish_reason, strict=True))
    assert {rid: ended[rid] for rid in request.rids[:2]} == dict.fromkeys(request.rids[:2], "length")
    assert set(trace.rows.prompt_id) >= {0, 1}


def interrupting(word: str) -> Callable[[str], None]:
    """Presses Ctrl-C when a message begins with `word`."""
    return lambda text: os.kill(os.getpid(), signal.SIGINT) if text.startswith(word) else None


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C interrupts, also where tests run in a shell's background and were told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
