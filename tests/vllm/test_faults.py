"""Every fault planted on the real vLLM is found where it starts, by its cause, and by no other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eagle_trace import Trace, open_trace
from eagle_trace.prompts import read_prompts
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_serving.host import ServerOptions
from eagle_trace_serving.requests import Request
from eagle_trace_serving.server import Server
from tests.support import vllm_faults
from tests.support.pairs import DRAFT, TARGET
from tests.support.verdicts import expect
from tests.support.warm.start import Warm
from tests.vllm.conftest import FAULT_SITE, Serve, Train, with_path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: inside the server: the fault, its cause and its first site
INSIDE = [
    ("", None, None),
    ("eps", "norm-eps", "layer.0.embed_norm"),
    ("offset", "norm-offset", "layer.0.embed_norm"),
    ("theta", "rope-theta", "layer.0.attn.q_rope"),
    ("interleaved", "rope-layout", "layer.0.attn.q_rope"),
    ("qkv-heads", "qkv-order", "layer.0.attn.q"),
    ("two-heads", "qkv-order", "layer.0.attn.q"),
    ("attention-not-reduced", "tp-shard", "layer.0.attn.out"),
    ("mlp-not-reduced", "tp-shard", "layer.0.mlp.out"),
    ("carry", "carry-norm", "carry"),
    ("permuted", "features-permuted", "target.hidden.0"),
    ("zeros", "features-degenerate", "target.hidden.1"),
    ("twice", "features-degenerate", "target.hidden.1"),
    ("features-late", "input-shift", "target.hidden.0"),
    ("positions-steps", "positions-wrong", "position"),
    ("positions-growing", "positions-wrong", "position"),
    ("draft-unmapped", "tokens-fed-wrongly", "token"),
    # last: what is not a number stays in slots of the cache that are masked, and vLLM's attention on a CPU shows it
    ("nan", "nonfinite", "layer.0.mlp.out"),
]


def looked_at(train: Trace, serve: Trace) -> Diff:
    return diagnosed(diff(train, serve), train, serve)


@pytest.fixture(scope="module")
def faulty(folder: Path, four_prompts: Path, warm: Warm) -> Iterator[Callable[[str], Trace]]:
    """Records the one server, with a fault committed inside it."""
    from eagle_trace_vllm.host import HOST

    named = folder / "fault"
    named.write_text("")
    request = Request(read_prompts(four_prompts)[:2], max_new_tokens=12)
    with warm(), with_path(FAULT_SITE, **{vllm_faults.FILE: str(named)}):
        options = ServerOptions(TARGET, DRAFT, dtype="float32")
        with Server(options, host=HOST) as server:

            def run(fault: str) -> Trace:
                out = folder / f"inside-{fault}.trace"
                if not out.exists():
                    named.write_text(fault)
                    out.mkdir()
                    server.record(request, out)
                    named.write_text("")  # servers of other tests find the same file
                return open_trace(out)

            yield run


@pytest.mark.parametrize(("fault", "cause", "site"), INSIDE, ids=[name or "healthy" for name, _, _ in INSIDE])
def test_a_fault_inside_the_server_is_named(
    fault: str, cause: str | None, site: str | None, faulty: Callable[[str], Trace], train: Train
) -> None:
    serve = faulty(fault)
    expect(looked_at(train(serve), serve), cause, site)


# ---- a draft that SpecForge trained: its own forward beside the same recordings


@pytest.fixture(scope="module")
def specforge_draft(folder: Path) -> Path:
    """The demo draft as SpecForge exports it."""
    pytest.importorskip("specforge", reason="pip install --no-deps specforge")
    from tests.support.specforge_drafts import exported

    return exported(folder / "specforge")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_specforges_forward_agrees_with_a_healthy_server(
    dtype: str, specforge_draft: Path, serve: Serve, train: Train
) -> None:
    served = serve(dtype=dtype)
    trained = train(served, host="specforge", draft=specforge_draft)
    assert (trained.manifest.host, trained.manifest.dtype) == ("specforge", dtype)
    result = looked_at(trained, served)
    assert len(result.sites) >= 81
    assert result.coverage.share == 1.0
    expect(result, None, None)


@pytest.mark.parametrize(("fault", "cause", "site"), INSIDE[1:], ids=[name for name, _, _ in INSIDE[1:]])
def test_a_fault_inside_the_server_is_named_beside_specforges_forward(
    fault: str, cause: str, site: str, specforge_draft: Path, faulty: Callable[[str], Trace], train: Train
) -> None:
    served = faulty(fault)
    expect(looked_at(train(served, host="specforge", draft=specforge_draft), served), cause, site)


@pytest.fixture(scope="module")
def two_prompts(folder: Path, four_prompts: Path) -> Path:
    path = folder / "two.jsonl"
    path.write_text("\n".join(four_prompts.read_text().splitlines()[:2]))
    return path


def _config(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, _tensors: config.update(changes)


def _layer(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, _tensors: config["transformer_layer_config"].update(changes)


def _without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _config, tensors: tensors.pop(name)


def _scaled(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def edit(_config: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name] * 1.25

    return edit


#: of what is deployed: a server each
DEPLOYED = {
    "theta-in-config": (
        _layer(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}), "rope-theta", "layer.0.attn.q_rope"
    ),
    "layer-ids": (_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "layer-ids-shifted", "target.hidden.0"),
    "residual-in-config": (_config(norm_before_residual=True), "residual-norm", "layer.0.attn.residual"),
    "head-missing": (_without("lm_head.weight"), "weights-missing", "logits"),
    "weights": (_scaled("layers.0.mlp.down_proj.weight"), "weights-differ", "layer.0.mlp.out"),
    "own-embedding": (_scaled("embed_tokens.weight"), "weights-differ", "embed"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DEPLOYED)
def test_a_fault_of_what_is_deployed_is_named(
    fault: str, folder: Path, two_prompts: Path, serve: Serve, train: Train
) -> None:
    edit, cause, site = DEPLOYED[fault]
    deployed = folder / f"deployed-{fault}"
    deployed.mkdir()
    config, tensors = json.loads((DRAFT / "config.json").read_text()), load_file(DRAFT / "model.safetensors")
    edit(config, tensors)
    (deployed / "config.json").write_text(json.dumps(config))
    save_file(tensors, deployed / "model.safetensors", metadata={"format": "pt"})
    trace = serve(draft=deployed, prompts=two_prompts, max_new_tokens=12)
    expect(looked_at(train(trace), trace), cause, site)


def test_the_document_marks_every_fault_that_is_planted_here() -> None:
    rows = (Path(__file__).parents[2] / "docs/fault-matrix.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    marked = {(row[0], row[2], row[3]) for row in cells if len(row) == 5 and row[4] == "yes"}
    assert marked >= {(fault, cause, f"`{site}`") for fault, cause, site in INSIDE if fault}
